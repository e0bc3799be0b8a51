package main

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"strconv"
)

const bufferBytes = 1 << 16

// head is the part of a message before its body that both ends look at.
type head struct {
	first   string // request or status line
	length  int    // of the body; -1: none was stated
	chunked bool
}

// readHead reads up to the empty line.
func readHead(reader *bufio.Reader) (head, error) {
	found := head{length: -1}
	for {
		line, err := reader.ReadSlice('\n')
		if err != nil {
			return found, err
		}
		line = bytes.TrimRight(line, "\r\n")
		if len(line) == 0 {
			return found, nil
		}
		if found.first == "" {
			found.first = string(line)
			continue
		}
		name, value, _ := bytes.Cut(line, []byte(":"))
		value = bytes.TrimSpace(value)
		switch {
		case bytes.EqualFold(name, []byte("content-length")):
			if found.length, err = strconv.Atoi(string(value)); err != nil {
				return found, fmt.Errorf("content-length %q", value)
			}
		case bytes.EqualFold(name, []byte("transfer-encoding")):
			found.chunked = bytes.EqualFold(value, []byte("chunked"))
		}
	}
}

// readBody reads a whole body into buffer and returns it; begun is called at its first byte.
func (message head) readBody(reader *bufio.Reader, buffer []byte, begun func()) ([]byte, error) {
	buffer = buffer[:0]
	if !message.chunked {
		if message.length <= 0 {
			begun()
			return buffer, nil
		}
		if _, err := reader.Peek(1); err != nil {
			return buffer, err
		}
		begun()
		return appendFrom(reader, buffer, message.length)
	}
	for first := true; ; first = false {
		line, err := reader.ReadSlice('\n')
		if err != nil {
			return buffer, err
		}
		size, err := strconv.ParseInt(string(bytes.TrimSpace(line)), 16, 32)
		if err != nil {
			return buffer, fmt.Errorf("size of a chunk: %q", line)
		}
		if first {
			begun()
		}
		if buffer, err = appendFrom(reader, buffer, int(size)+2); err != nil {
			return buffer, err
		}
		buffer = buffer[:len(buffer)-2] // what ends every chunk
		if size == 0 {
			return buffer, nil
		}
	}
}

func appendFrom(reader *bufio.Reader, buffer []byte, size int) ([]byte, error) {
	begin := len(buffer)
	if need := begin + size; need > cap(buffer) {
		grown := make([]byte, begin, 2*need)
		copy(grown, buffer)
		buffer = grown
	}
	buffer = buffer[:begin+size]
	_, err := io.ReadFull(reader, buffer[begin:])
	return buffer, err
}
