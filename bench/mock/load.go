package main

import (
	"bufio"
	"encoding/json"
	"flag"
	"fmt"
	"math/rand"
	"net"
	"os"
	"runtime"
	"sort"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

const (
	messages = 10 // of a conversation; the last of them is what 10 % new text changes
	deadline = 60 * time.Second
)

var words = strings.Fields(`the of and to in is that for it with as was on are by be this have from or had not but what
all were when we there can an your which their said if do will each about how up out them then she many some so these
would other into has more her two like him see time could no make than first been its who now people my made over did
down only way find use may water long little very after words called just where most know get through back much before
go good new write our used me man too any day same right look think also around another came come work three word must
because does part even place well such here take why things help put years different away again off went old number`)

// shape is what all requests of a run have in common.
type shape struct {
	words  int
	fresh  int // per cent of the words that are new with every request: 0, 10 or 100
	stream bool
	path   string
}

type outcome struct {
	Requests int     `json:"requests"`
	Seconds  float64 `json:"seconds"`
	P50      float64 `json:"ttft_p50_s"`
	P99      float64 `json:"ttft_p99_s"`
	Failed   int     `json:"failed"`
	Problem  string  `json:"problem"`
}

// drive asks as fast as answers come, one request at a time on each connection, and prints an outcome.
func drive(arguments []string) error {
	flags := flag.NewFlagSet("load", flag.ExitOnError)
	ports := flags.String("ports", "", "endpoints, asked in turns by connection")
	connections := flags.Int("connections", 16, "kept alive")
	seconds := flags.Float64("seconds", 3, "how long; 0: until --requests were answered")
	most := flags.Int64("requests", 0, "how many at most; 0: no limit")
	seed := flags.Int64("seed", 1, "of the texts")
	of := shape{path: "/v1/chat/completions"}
	flags.IntVar(&of.words, "words", 50, "of a prompt")
	flags.IntVar(&of.fresh, "fresh", 0, "per cent of new text: 0, 10 or 100")
	flags.BoolVar(&of.stream, "stream", false, "ask for streams")
	_ = flags.Parse(arguments)
	runtime.GOMAXPROCS(1)
	list, err := portsOf(*ports)
	if err != nil {
		return err
	}
	clients := make([]*client, *connections)
	for number := range clients {
		clients[number] = newClient(list[number%len(list)], of, *seed+int64(number))
	}
	begin := time.Now()
	end := begin.Add(24 * time.Hour)
	if *seconds > 0 {
		end = begin.Add(time.Duration(*seconds * float64(time.Second)))
	}
	var left atomic.Int64
	left.Store(*most)
	var running sync.WaitGroup
	for _, each := range clients {
		running.Add(1)
		go func() {
			defer running.Done()
			for time.Now().Before(end) && (*most == 0 || left.Add(-1) >= 0) && each.ask() {
			}
		}()
	}
	running.Wait()
	return json.NewEncoder(os.Stdout).Encode(sum(clients, time.Since(begin)))
}

func sum(clients []*client, took time.Duration) outcome {
	found := outcome{Seconds: took.Seconds()}
	var first []float64
	for _, each := range clients {
		first = append(first, each.first...)
		if each.problem != nil {
			found.Failed++
			found.Problem = each.problem.Error()
		}
	}
	found.Requests = len(first)
	if len(first) > 0 {
		sort.Float64s(first)
		found.P50, found.P99 = first[len(first)/2], first[len(first)*99/100]
	}
	return found
}

// client is one connection with a conversation of its own.
type client struct {
	port    int
	of      shape
	draw    *rand.Rand
	begin   string // of the body, that stays as it is
	request []byte
	answer  []byte
	first   []float64 // seconds to the first byte of each answer's body
	socket  net.Conn
	reader  *bufio.Reader
	problem error
}

func newClient(port int, of shape, seed int64) *client {
	made := &client{port: port, of: of, draw: rand.New(rand.NewSource(seed))}
	made.begin = made.conversation(messages)
	return made
}

// ask sends one request and reads its answer; false when that failed.
func (c *client) ask() bool {
	c.prepare()
	if c.problem = c.exchange(); c.problem != nil {
		if c.socket != nil {
			c.socket.Close()
		}
		return false
	}
	return true
}

func (c *client) exchange() (err error) {
	if c.socket == nil {
		if c.socket, err = net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", c.port)); err != nil {
			return err
		}
		c.reader = bufio.NewReaderSize(c.socket, bufferBytes)
	}
	if err = c.socket.SetDeadline(time.Now().Add(deadline)); err != nil {
		return err
	}
	sent := time.Now()
	if _, err = c.socket.Write(c.request); err != nil {
		return err
	}
	said, err := readHead(c.reader)
	if err != nil {
		return fmt.Errorf("before the answer's head: %w", err)
	}
	begun := sent
	if c.answer, err = said.readBody(c.reader, c.answer, func() { begun = time.Now() }); err != nil {
		return fmt.Errorf("in the answer: %w", err)
	}
	if !strings.HasPrefix(said.first, "HTTP/1.1 200") {
		return fmt.Errorf("%s: %.200s", said.first, c.answer)
	}
	c.first = append(c.first, begun.Sub(sent).Seconds())
	return nil
}

// prepare makes the next request; text that is not new is made once.
func (c *client) prepare() {
	if c.request != nil && c.of.fresh == 0 {
		return
	}
	text := c.begin
	switch c.of.fresh {
	case 10:
		text = c.begin[:strings.LastIndex(c.begin, ",{")] + "," + c.message(messages-1)
	case 100:
		text = c.conversation(messages)
	}
	body := fmt.Sprintf("{\"model\":\"%s\",\"stream\":%v,\"max_tokens\":16,\"messages\":[%s]}", model, c.of.stream, text)
	c.request = fmt.Appendf(c.request[:0], "POST %s HTTP/1.1\r\nhost: 127.0.0.1:%d\r\n"+
		"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s", c.of.path, c.port, len(body), body)
}

func (c *client) conversation(count int) string {
	made := make([]string, count)
	for number := range made {
		made[number] = c.message(number)
	}
	return strings.Join(made, ",")
}

func (c *client) message(number int) string {
	role := "user"
	if number == 0 {
		role = "system"
	} else if number%2 == 0 {
		role = "assistant"
	}
	var text strings.Builder
	for range c.of.words / messages {
		text.WriteString(words[c.draw.Intn(len(words))])
		text.WriteByte(' ')
	}
	return fmt.Sprintf("{\"role\":\"%s\",\"content\":\"%s\"}", role, text.String())
}
