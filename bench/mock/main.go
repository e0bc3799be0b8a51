// Command mock is both ends of a bench of routers: engines that answer at once, and the load on them.
//
//	mock engine --count 2 [--pieces 16]
//	mock load --ports 9000 --connections 16 --seconds 3 --words 4000 --fresh 10 [--stream] [--requests N]
//
// Neither may be what limits the bench, so both speak HTTP/1.1 by hand and keep to the standard library.
package main

import (
	"fmt"
	"os"
	"strconv"
	"strings"
)

func main() {
	if len(os.Args) < 2 {
		fail(fmt.Errorf("say engine or load"))
	}
	switch os.Args[1] {
	case "engine":
		fail(serve(os.Args[2:]))
	case "load":
		fail(drive(os.Args[2:]))
	default:
		fail(fmt.Errorf("%q is neither engine nor load", os.Args[1]))
	}
}

func fail(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "mock:", err)
		os.Exit(1)
	}
}

func portsOf(text string) ([]int, error) {
	var ports []int
	for _, item := range strings.Split(text, ",") {
		port, err := strconv.Atoi(item)
		if err != nil {
			return nil, fmt.Errorf("--ports: %q is no port", item)
		}
		ports = append(ports, port)
	}
	return ports, nil
}
