package redteam

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/base64"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// noted is a connection whose every byte is noted, also what no server
// understands.
type noted struct {
	net.Conn
	note func([]byte)
}

func (c noted) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if n > 0 {
		c.note(b[:n])
	}
	return n, err
}

// accepted is a listener of connections that come by other ways.
type accepted struct {
	net.Listener
	conns chan net.Conn
	end   <-chan struct{}
}

func (l accepted) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.end:
		return nil, net.ErrClosed
	}
}

// site is a web server that notes and echoes; with leaf it is one over TLS.
func (a *arena) site(l net.Listener, place string, leaf func(string) *tls.Certificate) {
	h := a.handler(place)
	protocols := new(http.Protocols)
	protocols.SetUnencryptedHTTP2(true) // TLS isn't visible to it
	one, two := &http.Server{Handler: h}, &http.Server{Handler: h, Protocols: protocols}
	note := func(b []byte) { a.note(place, b) }
	config := &tls.Config{NextProtos: []string{"h2", "http/1.1"}, MinVersion: tls.VersionTLS12, GetCertificate: func(h *tls.ClientHelloInfo) (*tls.Certificate, error) {
		if h.ServerName == "" {
			return leaf("unnamed.test"), nil
		}
		return leaf(h.ServerName), nil
	}}
	ctx, end := context.WithCancel(context.Background())
	plain, framed := accepted{l, make(chan net.Conn), ctx.Done()}, accepted{l, make(chan net.Conn), ctx.Done()}
	a.tb.Cleanup(func() { end(); _, _ = one.Close(), two.Close() })
	hand := func(to accepted, c net.Conn) {
		select {
		case to.conns <- c:
		case <-ctx.Done():
		}
	}
	go func() { _ = one.Serve(plain) }()
	go func() { _ = two.Serve(framed) }()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			c = noted{c, note} // also what never becomes TLS
			if leaf == nil {
				hand(plain, c)
				continue
			}
			go func() {
				t := tls.Server(c, config)
				ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
				defer cancel()
				switch err := t.HandshakeContext(ctx); {
				case err != nil:
					_ = c.Close()
				case t.ConnectionState().NegotiatedProtocol == "h2":
					hand(framed, a.frames(t, place))
				default:
					hand(plain, noted{t, note})
				}
			}()
		}
	}()
}

// frames is a connection of HTTP/2 of which what is in its frames is noted, also
// what no server would take.
func (a *arena) frames(c net.Conn, place string) net.Conn {
	r, w := io.Pipe()
	go func() {
		defer func() { _, _ = io.Copy(io.Discard, r) }()
		if _, err := io.CopyN(io.Discard, r, int64(len(http2.ClientPreface))); err != nil {
			return
		}
		f := http2.NewFramer(io.Discard, r)
		f.AllowIllegalReads = true
		d := hpack.NewDecoder(4096, func(h hpack.HeaderField) { a.note(place, []byte(h.Name+": "+h.Value+"\n")) })
		for {
			frame, err := f.ReadFrame()
			if err != nil {
				return
			}
			switch frame := frame.(type) {
			case *http2.HeadersFrame:
				_, _ = d.Write(frame.HeaderBlockFragment())
			case *http2.DataFrame:
				a.note(place, frame.Data())
			}
		}
	}()
	return framed{noted{c, func(b []byte) { _, _ = w.Write(b) }}, w}
}

type framed struct {
	noted
	w *io.PipeWriter
}

func (c framed) Close() error {
	_ = c.w.Close()
	return c.noted.Close()
}

// handler notes each request, under its host too, and answers with what it got.
func (a *arena) handler(place string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		var seen bytes.Buffer
		fmt.Fprintf(&seen, "%s %s%s\n", r.Method, r.Host, r.RequestURI)
		_ = r.Header.Write(&seen)
		seen.Write(body)
		a.note(place, seen.Bytes())
		a.note("host "+r.Host, seen.Bytes())
		if to, ok := strings.CutPrefix(r.URL.Path, "/redirect/"); ok {
			http.Redirect(w, r, "http://"+to, http.StatusFound)
			return
		}
		if how, ok := strings.CutPrefix(r.URL.Path, "/reflect/"); ok {
			reflect(w, how, r.Header.Get("X-Api-Key"))
			return
		}
		fmt.Fprintf(w, "served %s%s at %s\n", r.Host, r.URL.Path, place)
		for name, values := range r.Header {
			fmt.Fprintf(w, "%s: %s\n", name, strings.Join(values, ", "))
		}
	})
}

// reflect gives a value back in the way that the rest of a path names.
func reflect(w http.ResponseWriter, how, value string) {
	how, _, _ = strings.Cut(how, "/")
	switch how {
	case "raw":
		_, _ = io.WriteString(w, value)
	case "base64":
		_, _ = io.WriteString(w, base64.StdEncoding.EncodeToString([]byte(value)))
	case "base64-url":
		_, _ = io.WriteString(w, base64.RawURLEncoding.EncodeToString([]byte("x"+value)))
	case "percent":
		for _, c := range []byte(value) {
			fmt.Fprintf(w, "%%%02x", c)
		}
	case "header":
		w.Header().Set("X-Echo", value)
	case "trailer":
		w.Header().Set("Trailer", "X-Echo")
		_, _ = io.WriteString(w, "behind it\n")
		w.Header().Set("X-Echo", value)
	case "chunks":
		for _, c := range []byte(value) {
			_, _ = w.Write([]byte{c})
			_ = http.NewResponseController(w).Flush()
		}
	}
}
