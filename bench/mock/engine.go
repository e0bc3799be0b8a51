package main

import (
	"bufio"
	"bytes"
	"flag"
	"fmt"
	"net"
	"os"
	"runtime"
	"strconv"
	"strings"
)

const (
	model = "mock"
	piece = "data: {\"id\":\"x\",\"object\":\"chat.completion.chunk\",\"choices\":" +
		"[{\"index\":0,\"delta\":{\"content\":\" a\"}}]}\n\n"
	streamHead = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n" +
		"transfer-encoding: chunked\r\n\r\n"
	whole = "{\"id\":\"x\",\"object\":\"chat.completion\",\"created\":0,\"model\":\"mock\",\"choices\":" +
		"[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\" a a a a\"},\"finish_reason\":\"length\"}]," +
		"\"usage\":{\"prompt_tokens\":4000,\"completion_tokens\":16,\"total_tokens\":4016}}"
	card = "{\"object\":\"list\",\"data\":[{\"id\":\"mock\",\"object\":\"model\",\"created\":0," +
		"\"owned_by\":\"mock\",\"max_model_len\":131072}]}"
	charactersPerToken = 4
)

// serve prints a port for every engine and answers there until the process ends.
func serve(arguments []string) error {
	flags := flag.NewFlagSet("engine", flag.ExitOnError)
	count := flags.Int("count", 1, "how many engines, each on a port of its own")
	pieces := flags.Int("pieces", 16, "of a streamed answer")
	verbose := flags.Bool("verbose", false, "say which paths are asked for")
	_ = flags.Parse(arguments)
	runtime.GOMAXPROCS(1)
	stream := []byte(fmt.Sprintf("%x\r\n%s\r\n", len(piece), piece))
	failed := make(chan error)
	for range *count {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return err
		}
		fmt.Println(listener.Addr().(*net.TCPAddr).Port)
		go func() {
			for {
				connection, err := listener.Accept()
				if err != nil {
					failed <- err
					return
				}
				go (&engine{connection, stream, *pieces, *verbose}).answer()
			}
		}()
	}
	return <-failed
}

// engine serves one connection.
type engine struct {
	connection net.Conn
	stream     []byte
	pieces     int
	verbose    bool
}

func (e *engine) answer() {
	defer e.connection.Close()
	reader := bufio.NewReaderSize(e.connection, bufferBytes)
	var body []byte
	for {
		asked, err := readHead(reader)
		if err == nil {
			body, err = asked.readBody(reader, body, func() {})
		}
		if err == nil {
			err = e.say(asked.first, body)
		}
		if err != nil {
			return
		}
	}
}

func (e *engine) say(line string, body []byte) error {
	if e.verbose {
		fmt.Fprintln(os.Stderr, line, len(body))
	}
	switch {
	case strings.Contains(line, "tokenize"):
		ids := tokens(body)
		return e.json(fmt.Sprintf("{\"tokens\":[%s],\"count\":%d,\"max_model_len\":131072}", ids, strings.Count(ids, ",")+1))
	case strings.Contains(line, "/render"):
		return e.json(fmt.Sprintf("{\"request_id\":\"x\",\"token_ids\":[%s],\"sampling_params\":{},\"model\":\"mock\"}", tokens(body)))
	case strings.HasPrefix(line, "GET"):
		return e.json(card)
	case !bytes.Contains(body, []byte("\"stream\":true")) && !bytes.Contains(body, []byte("\"stream\": true")):
		return e.json(whole)
	}
	if _, err := e.connection.Write([]byte(streamHead)); err != nil {
		return err
	}
	for range e.pieces { // each in a write of its own, as an engine's steps
		if _, err := e.connection.Write(e.stream); err != nil {
			return err
		}
	}
	_, err := e.connection.Write([]byte("0\r\n\r\n"))
	return err
}

func (e *engine) json(body string) error {
	text := fmt.Sprintf("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s", len(body), body)
	_, err := e.connection.Write([]byte(text))
	return err
}

// tokens are ids that depend on the text, so that equal prefixes have equal ones; no tokenizer made them.
func tokens(body []byte) string {
	ids := make([]byte, 0, 2*len(body))
	for begin := 0; begin < len(body); begin += charactersPerToken {
		id := 7
		for _, character := range body[begin:min(len(body), begin+charactersPerToken)] {
			id = (31*id + int(character)) % 49000
		}
		if begin > 0 {
			ids = append(ids, ',')
		}
		ids = strconv.AppendInt(ids, int64(id), 10)
	}
	return string(ids)
}
