// Inside is the hostile program of the red-team suite: root in a sandbox, it does
// what it is told on standard input, a JSON list of steps, and prints what came of
// each, one JSON object a line. The suite builds it, copies it into sandboxes and
// runs it there; what a step can do and what it sends is the suite's to say.
package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"syscall"
	"time"
)

// Step is one thing to do.
type Step struct {
	Op      string        `json:"op"` // tcp, udp, raw, packet, shell, flood, listen, links
	Addr    string        `json:"addr,omitempty"`
	TLS     *TLS          `json:"tls,omitempty"`
	Send    [][]byte      `json:"send,omitempty"` // one write each
	Pause   time.Duration `json:"pause,omitempty"`
	Wait    time.Duration `json:"wait,omitempty"` // for an answer; 3 s
	Proto   int           `json:"proto,omitempty"`
	Command string        `json:"command,omitempty"`
	Count   int           `json:"count,omitempty"`
}

// TLS are the client's settings of a tcp step. Certificates are not verified:
// this side is the attacker's.
type TLS struct {
	SNI  string   `json:"sni,omitempty"`
	ALPN []string `json:"alpn,omitempty"`
}

// Result is what came of a step.
type Result struct {
	Connected bool     `json:"connected"`
	Got       []byte   `json:"got,omitempty"`
	Err       string   `json:"err,omitempty"`
	Certs     [][]byte `json:"certs,omitempty"` // that were shown
}

const mostRead = 256 << 10

func main() {
	var steps []Step
	if err := json.NewDecoder(bufio.NewReader(os.Stdin)).Decode(&steps); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	out := json.NewEncoder(os.Stdout)
	for _, s := range steps {
		if s.Wait == 0 {
			s.Wait = 3 * time.Second
		}
		if err := out.Encode(s.do()); err != nil {
			os.Exit(1)
		}
	}
}

func (s Step) do() (r Result) {
	var err error
	switch s.Op {
	case "tcp":
		r, err = s.tcp()
	case "udp":
		r, err = s.udp()
	case "raw":
		err = s.raw()
	case "packet":
		err = s.packet()
	case "shell":
		r.Got, err = exec.Command("/bin/sh", "-c", s.Command).CombinedOutput()
	case "flood":
		r, err = s.flood()
	case "listen":
		r, err = s.listen()
	case "links":
		r, err = links()
	default:
		err = fmt.Errorf("no such step: %q", s.Op)
	}
	if err != nil {
		r.Err = err.Error()
	}
	return r
}

func (s Step) dial() (net.Conn, error) {
	return (&net.Dialer{Timeout: s.Wait}).DialContext(context.Background(), "tcp", s.Addr)
}

func (s Step) tcp() (r Result, err error) {
	conn, err := s.dial()
	if err != nil {
		return r, err
	}
	defer conn.Close()
	r.Connected = true
	_ = conn.SetDeadline(time.Now().Add(s.Wait + time.Duration(len(s.Send))*s.Pause))
	if s.TLS != nil {
		c := tls.Client(conn, &tls.Config{ServerName: s.TLS.SNI, NextProtos: s.TLS.ALPN, InsecureSkipVerify: true})
		if err := c.Handshake(); err != nil {
			return r, err
		}
		for _, cert := range c.ConnectionState().PeerCertificates {
			r.Certs = append(r.Certs, cert.Raw)
		}
		conn = c
	}
	for _, b := range s.Send {
		if _, err := conn.Write(b); err != nil {
			r.Got, _ = io.ReadAll(io.LimitReader(conn, mostRead))
			return r, err
		}
		time.Sleep(s.Pause)
	}
	r.Got, err = readSome(conn)
	return r, err
}

// readSome reads until nothing more comes for a while: most servers keep a
// connection open.
func readSome(conn net.Conn) (got []byte, err error) {
	b := make([]byte, 64<<10)
	for len(got) < mostRead {
		n, err := conn.Read(b)
		got = append(got, b[:n]...)
		switch {
		case errors.Is(err, io.EOF), errors.Is(err, os.ErrDeadlineExceeded) && len(got) > 0:
			return got, nil
		case err != nil:
			return got, err
		}
		_ = conn.SetReadDeadline(time.Now().Add(200 * time.Millisecond))
	}
	return got, nil
}

func (s Step) udp() (r Result, err error) {
	conn, err := net.Dial("udp", s.Addr)
	if err != nil {
		return r, err
	}
	defer conn.Close()
	r.Connected = true
	for _, b := range s.Send {
		if _, err := conn.Write(b); err != nil {
			return r, err
		}
		time.Sleep(s.Pause)
	}
	_ = conn.SetDeadline(time.Now().Add(s.Wait))
	b := make([]byte, 64<<10)
	n, err := conn.Read(b)
	r.Got = b[:n]
	return r, err
}

// raw sends IP datagrams of a protocol of one's own.
func (s Step) raw() error {
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_RAW, s.Proto)
	if err != nil {
		return fmt.Errorf("open a raw socket: %w", err)
	}
	defer func() { _ = syscall.Close(fd) }()
	addr, err := net.ResolveIPAddr("ip4", s.Addr)
	if err != nil {
		return err
	}
	to := &syscall.SockaddrInet4{Addr: [4]byte(addr.IP.To4())}
	for _, b := range s.Send {
		if err := syscall.Sendto(fd, b, 0, to); err != nil {
			return fmt.Errorf("send: %w", err)
		}
	}
	return nil
}

// packet sends whole Ethernet frames through eth0.
func (s Step) packet() error {
	link, err := net.InterfaceByName("eth0")
	if err != nil {
		return err
	}
	fd, err := syscall.Socket(syscall.AF_PACKET, syscall.SOCK_RAW, 0x0300)
	if err != nil {
		return fmt.Errorf("open a packet socket: %w", err)
	}
	defer func() { _ = syscall.Close(fd) }()
	for _, b := range s.Send {
		if err := syscall.Sendto(fd, b, 0, &syscall.SockaddrLinklayer{Ifindex: link.Index, Halen: 6}); err != nil {
			return fmt.Errorf("send: %w", err)
		}
	}
	return nil
}

// flood opens Count connections and keeps them until it has tried them all.
func (s Step) flood() (r Result, err error) {
	open := 0
	for range s.Count {
		conn, err := s.dial()
		if err != nil {
			r.Err = err.Error()
			continue
		}
		defer conn.Close()
		open++
	}
	r.Connected = open > 0
	r.Got = fmt.Append(nil, open)
	return r, nil
}

// listen takes connections at Addr, until one says "stop", and returns all that
// came.
func (s Step) listen() (r Result, err error) {
	l, err := net.Listen("tcp4", s.Addr)
	if err != nil {
		return r, err
	}
	defer l.Close()
	_ = l.(*net.TCPListener).SetDeadline(time.Now().Add(s.Wait))
	for !bytes.Contains(r.Got, []byte("stop")) {
		c, err := l.Accept()
		if err != nil {
			return r, err
		}
		_ = c.SetDeadline(time.Now().Add(time.Second))
		b, _ := io.ReadAll(io.LimitReader(c, 4096))
		r.Got = append(append(r.Got, b...), '\n')
		_ = c.Close()
	}
	return r, nil
}

// links tells what netlink does of interfaces and addresses.
func links() (r Result, err error) {
	all, err := net.Interfaces()
	if err != nil {
		return r, err
	}
	for _, i := range all {
		addrs, err := i.Addrs()
		if err != nil {
			return r, err
		}
		r.Got = fmt.Appendf(r.Got, "%s %v\n", i.Name, addrs)
	}
	return r, nil
}
