package guestlink

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"slices"
	"time"

	"connectrpc.com/connect"

	"cloche.dev/cloche/internal/guestapi"
	"cloche.dev/cloche/internal/guestapi/guestv1"
)

// listen accepts connections until the link is closed.
func (l *Link) listen() {
	for l.ctx.Err() == nil {
		ln, err := l.cfg.Listen()
		if err == nil && l.adopt(ln) {
			err = l.accept(ln)
			_ = ln.Close()
		}
		if l.ctx.Err() != nil {
			return
		}
		l.cfg.Log.Warn("listening for the guest failed", "error", err)
		select {
		case <-l.ctx.Done():
		case <-time.After(listenRetry):
		}
	}
}

// adopt notes the listener for Close, unless that has been called.
func (l *Link) adopt(ln net.Listener) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		_ = ln.Close()
		return false
	}
	l.ln = ln
	return true
}

func (l *Link) accept(ln net.Listener) error {
	for {
		conn, err := ln.Accept()
		if err != nil {
			return err
		}
		if !l.admit(conn) {
			continue
		}
		l.wg.Go(func() { l.handle(conn) })
	}
}

// admit takes conn among the few that are yet to prove themselves. The oldest
// makes room: an honest agent needs a millisecond, so whoever has waited
// longest is least likely to be one.
func (l *Link) admit(conn net.Conn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		_ = conn.Close()
		return false
	}
	flood := len(l.pending) >= maxPending
	if flood {
		_ = l.pending[0].Close()
		l.pending = l.pending[1:]
	}
	l.pending = append(l.pending, conn)
	if flood {
		l.mu.Unlock()
		time.Sleep(unprovenPause) // a guest that floods waits in its own queue
		l.mu.Lock()
	}
	return true
}

// settled takes conn out of the pending ones. False means that it was pushed
// out or that the link is closed. A control connection that may have its setup
// becomes the one that is being set up. The one before it makes room: an agent
// dials anew only when it has lost the connection before.
func (l *Link) settled(conn net.Conn, setup bool) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	i := slices.Index(l.pending, conn)
	if i < 0 {
		return false
	}
	l.pending = slices.Delete(l.pending, i, i+1)
	if l.closed {
		return false
	}
	if setup {
		if l.setting != nil {
			_ = l.setting.Close()
		}
		l.setting = conn
	}
	return true
}

// unsettled tells that the setup of conn has come to its end. False means that
// it was displaced meanwhile.
func (l *Link) unsettled(conn net.Conn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.setting != conn {
		return false
	}
	l.setting = nil
	return true
}

// handle carries one connection through its handshake and, if it is the
// control connection, through its life.
func (l *Link) handle(conn net.Conn) {
	_ = conn.SetDeadline(time.Now().Add(helloTimeout))
	hello, answer, err := l.shake(conn)
	control := hello.GetPurpose() == guestapi.PurposeControl
	if !l.settled(conn, control && answer.GetOk()) || err != nil {
		_ = conn.Close()
		if err != nil && l.ctx.Err() == nil {
			l.cfg.Log.Debug("a guest's hello was refused", "error", err)
		}
		return
	}
	defer l.unsettled(conn)
	if err := guestapi.WriteAnswer(conn, answer); err != nil || !answer.GetOk() {
		_ = conn.Close()
		return
	}
	_ = conn.SetDeadline(time.Time{})
	p, err := newPeer(l.ctx, conn)
	if err != nil {
		l.cfg.Log.Debug("HTTP/2 with the guest failed", "error", err)
		return
	}
	if !control {
		l.deliver(p, hello.GetTicket())
		return
	}
	defer func() { _ = p.Close() }()
	if err := l.welcome(p); err != nil {
		level := slog.LevelWarn
		if !l.unsettled(conn) {
			level = slog.LevelDebug // a newer one took its place
		}
		l.cfg.Log.Log(l.ctx, level, "the guest's setup failed", "error", err)
		return
	}
	l.live(p)
}

// shake reads the hello and decides what it is answered.
func (l *Link) shake(conn net.Conn) (*guestv1.Hello, *guestv1.HelloAnswer, error) {
	nonce, err := guestapi.Challenge(conn)
	if err != nil {
		return nil, nil, err
	}
	hello, err := guestapi.ReadHello(conn)
	if err != nil {
		return nil, nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	control := hello.GetPurpose() == guestapi.PurposeControl
	proven := guestapi.Proves(hello, l.cfg.Key, nonce)
	if !proven && (l.welcomed || !control || !l.newcomer(hello, nonce)) {
		return nil, nil, errors.New("no proof")
	}
	version, ok := guestapi.Negotiate(hello.GetMinVersion(), hello.GetMaxVersion())
	if !ok {
		return hello, &guestv1.HelloAnswer{Reason: "no common version of the protocol"}, nil
	}
	answer := &guestv1.HelloAnswer{Ok: true, Version: version}
	if control {
		answer.Epoch = l.cfg.Epoch
		if !proven {
			answer.Key = l.cfg.Key
		}
	} else if l.tickets[hello.GetTicket()] == nil {
		return nil, nil, errors.New("unknown ticket")
	}
	return hello, answer, nil
}

// newcomer tells whether hello may come from a guest that has yet to be given
// its key: in a machine that was restored it proves the key of the image, in a
// fresh one it can prove nothing. A restored guest without proof is never
// believed, since its users' processes live already.
func (l *Link) newcomer(hello *guestv1.Hello, nonce guestapi.Nonce) bool {
	if len(l.cfg.Former) != 0 {
		return guestapi.Proves(hello, l.cfg.Former, nonce)
	}
	return len(hello.GetProof()) == 0
}

// deliver hands an extra connection to who asked for it. A ticket is good once.
func (l *Link) deliver(p *peer, ticket string) {
	l.mu.Lock()
	got := l.tickets[ticket]
	delete(l.tickets, ticket)
	if got != nil && !l.closed {
		got <- p // has room for the one
		p = nil
	}
	l.mu.Unlock()
	if p != nil {
		_ = p.Close()
	}
}

// welcome gives the guest its setup, then records that it has its key.
func (l *Link) welcome(p *peer) error {
	limit := setupTimeout
	if l.cfg.Setup.GetRestored() {
		limit += hooksTimeout
	}
	ctx, cancel := context.WithTimeout(l.ctx, limit)
	defer cancel()
	answer, err := p.setup.CallUnary(ctx, connect.NewRequest(l.setupNow()))
	if err != nil {
		return guestapi.FromRPC(err)
	}
	l.tell(answer.Msg)
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.welcomed {
		return nil
	}
	if l.cfg.Welcome != nil {
		if err := l.cfg.Welcome(); err != nil {
			return err
		}
	}
	l.welcomed = true
	return nil
}

// tell logs which hooks failed, without their output, and hands the answer on.
func (l *Link) tell(answer *guestv1.SetupResponse) {
	failed := 0
	for _, h := range answer.GetHooks() {
		if h.GetCode() != 0 {
			failed++
		}
	}
	if failed > 0 {
		l.cfg.Log.Warn("on_restore hooks of the guest failed", "failed", failed, "of", len(answer.GetHooks()))
	}
	if l.cfg.SetUp != nil {
		l.cfg.SetUp(answer)
	}
}

// live publishes p, displacing an older one, until p ends. Where a newer one
// is being set up already, p has been closed, and displaces nobody.
func (l *Link) live(p *peer) {
	l.mu.Lock()
	if l.closed || l.setting != p.net.Conn {
		l.mu.Unlock()
		return
	}
	l.setting = nil
	if l.control != nil {
		_ = l.control.Close()
	}
	l.control = p
	l.gen++
	l.notify()
	select {
	case l.connected <- struct{}{}:
	default:
	}
	l.mu.Unlock()
	<-p.done
	l.mu.Lock()
	if l.control == p {
		l.control = nil
		l.notify()
	}
	l.mu.Unlock()
}

func (l *Link) notify() {
	close(l.changed)
	l.changed = make(chan struct{})
}
