package httpapi

import (
	"context"
	"log/slog"
	"net"
	"net/http"
	"time"
)

// NewServer wraps a handler (the router) in a server with bounds on everything
// that precedes a handler; handlers bound bodies and answers themselves, since
// streams last. Requests' contexts derive from base: cancelling it ends
// streams and long polls, which http.Server.Shutdown would wait for.
func NewServer(base context.Context, handler http.Handler, log *slog.Logger) *http.Server {
	return &http.Server{
		Handler:           handler,
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    1 << 20, // a contract's longest query fits, percent-encoded
		BaseContext:       func(net.Listener) context.Context { return base },
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}
}
