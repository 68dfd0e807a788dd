// Package dataplane is the data half of the native HTTP API: sessions (attach,
// stdin, signals, terminals over a WebSocket, one-call exec), files, archives
// and tunnels to ports. It has tokens of its own (a session token is good for
// one session, an access token for the files or the ports of one sandbox) and
// takes API keys too.
//
// Invariants: a GET starts and wakes nothing, but for the handshake of a tunnel;
// whatever needs the machine says so to control (Users), by which idle policies
// and wake on access work, and an attach, a terminal, a transfer or a tunnel
// holds its sandbox for as long as it is open; a session is touched only through its
// sandbox in the caller's scope; a reader that stalls holds one goroutine and
// one record, never a command or another reader; everything that comes out of
// a guest (sizes, names, streams, error texts) is bounded here before it
// reaches a client, and a guest that lies is answered as unavailable, never as
// a fault of Cloche.
//
// internal/server makes one Plane and registers it in the router of
// internal/httpapi/rest. It reads logs from internal/node/session and speaks to
// guests through the clients that the node hands out.
package dataplane
