// Package client is the public Go client of a Cloche daemon. It speaks the
// native HTTP API (package api) and adds what every caller would otherwise
// write again: typed errors, idempotency keys, bounded retries, waiting for
// operations, streams of output that go on by offset when the daemon went away
// and came back, standard input that is never doubled, files, trees and
// tunnels.
//
// A Client is safe for concurrent use. It starts no goroutine of its own that
// outlives a call, except those of net/http's connections.
package client

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"
)

// DefaultURL is where `cloche serve` listens by default.
const DefaultURL = "http://127.0.0.1:7070"

// The environment variables that New reads where Options leave a field empty.
const (
	EnvURL = "CLOCHE_URL"
	EnvKey = "CLOCHE_API_KEY"
)

// Options say how to reach a daemon. The zero value of each field has a
// sensible meaning.
type Options struct {
	// URL of the daemon; "" is $CLOCHE_URL or else DefaultURL.
	URL string
	// Key is the API key; "" is $CLOCHE_API_KEY.
	Key string
	// HTTPClient carries the requests. It must have no Timeout, since output
	// is streamed, and should not follow redirects, since they would take the
	// key with them. nil is one that is made for the purpose.
	HTTPClient *http.Client
	// UserAgent is sent with each request; "" is "cloche-go".
	UserAgent string
	// Retry bounds for how long a call is repeated when the daemon can't be
	// reached or asks to come back later; 0 is 10 s, negative is never.
	Retry time.Duration
	// Reconnect bounds for how long streams, standard input and waits outlast
	// a daemon that does not answer; 0 is 2 min, negative is not at all.
	Reconnect time.Duration
}

// Client speaks to one daemon with one key.
type Client struct {
	base      *url.URL
	key       string
	http      *http.Client
	userAgent string
	retry     time.Duration
	reconnect time.Duration
}

// New makes a client. It does not connect.
func New(o Options) (*Client, error) {
	if o.URL == "" {
		o.URL = os.Getenv(EnvURL)
	}
	if o.URL == "" {
		o.URL = DefaultURL
	}
	if o.Key == "" {
		o.Key = os.Getenv(EnvKey)
	}
	base, err := url.Parse(strings.TrimRight(o.URL, "/"))
	if err != nil {
		return nil, fmt.Errorf("the daemon's URL: %w", err)
	}
	if base.Scheme != "http" && base.Scheme != "https" || base.Host == "" {
		return nil, fmt.Errorf("the daemon's URL must be like %s, not %q", DefaultURL, o.URL)
	}
	if base.RawQuery != "" || base.Fragment != "" || base.User != nil {
		return nil, errors.New("the daemon's URL has no query, fragment or user")
	}
	if strings.ContainsFunc(o.Key, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return nil, errors.New("the API key holds characters that no key has")
	}
	c := &Client{base: base, key: o.Key, http: o.HTTPClient, userAgent: o.UserAgent, retry: o.Retry, reconnect: o.Reconnect}
	if c.http == nil {
		c.http = newHTTPClient()
	}
	if c.userAgent == "" {
		c.userAgent = "cloche-go"
	}
	if c.retry == 0 {
		c.retry = 10 * time.Second
	}
	if c.reconnect == 0 {
		c.reconnect = 2 * time.Minute
	}
	return c, nil
}

// URL returns the daemon's URL.
func (c *Client) URL() string { return c.base.String() }

func newHTTPClient() *http.Client {
	dialer := &net.Dialer{Timeout: 5 * time.Second, KeepAlive: 15 * time.Second}
	return &http.Client{
		Transport: &http.Transport{
			Proxy:                 http.ProxyFromEnvironment,
			DialContext:           dialer.DialContext,
			MaxIdleConnsPerHost:   16,
			IdleConnTimeout:       60 * time.Second,
			TLSHandshakeTimeout:   10 * time.Second,
			ExpectContinueTimeout: 2 * time.Second,
			DisableCompression:    true,
			ReadBufferSize:        128 << 10,
			WriteBufferSize:       64 << 10,
			ForceAttemptHTTP2:     true,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}
