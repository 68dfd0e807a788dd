package session

import (
	"bytes"
	"context"
	"encoding/binary"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"unicode/utf8"

	"connectrpc.com/connect"

	"cloche.dev/cloche/internal/guestapi/guestv1"
)

// FuzzGuestEvents: a guest tells the output of a command in any order, with any
// offsets and sizes, breaks off, and says anything of what it has. The log holds
// what a plain model of the protocol says, readers see it without a seam,
// and it ends.
func FuzzGuestEvents(f *testing.F) {
	said := func(ops ...op) (b []byte) {
		for _, o := range ops {
			b = append(b, o.encode()...)
		}
		return b
	}
	f.Add(said(op{sayOut, here, 0, 5}, op{sayErr, here, 0, 7}, op{sayExit, here, 0, 3}))
	f.Add(said(op{sayOut, here, 0, 9}, op{sayOut, back, 4, 9}, op{sayErr, back, 90, 200}, op{sayExit, here, 0, 0}, op{sayExit, here, 0, 1}))
	f.Add(said(op{sayOut, here, 0, 9}, op{sayOut, ahead, 1, 9}))
	f.Add(said(op{sayOut, here, 0, 9}, op{sayExit, back, 1, 9}))
	f.Add(said(op{sayErr, last, 0, 60}))
	f.Add(said(op{sayOut, here, 0, 0xffff}, op{sayNothing, here, 0, 0}, op{breakOff, here, 0, 0}, op{sayOut, back, 200, 300}))
	f.Add(said(op{sayOut, here, 0, 30}, op{meetAgain, ahead, 50, 50}, op{sayOut, here, 0, 30}))
	f.Add(said(op{meetAgain, last, 0, 0}, op{sayOut, here, 0, 30}))
	f.Add(said(op{sayOut, here, 0, 30}, op{meetAgain, back, 7, 0}))
	r := newRig(f, func(*fakeProc, []string) {}, func(o *Options) {
		if dir, err := os.MkdirTemp("/dev/shm", "session-fuzz-"); err == nil { // where nothing waits for a disk
			f.Cleanup(func() { _ = os.RemoveAll(dir) })
			o.Dir = dir
		}
	})
	var current atomic.Pointer[scripted]
	r.guest.follow = func(_ context.Context, at uint64, s *connect.ServerStream[guestv1.Event]) error {
		return current.Load().follow(at, s)
	}
	f.Fuzz(func(t *testing.T, script []byte) {
		s := &scripted{t: t, script: script, again: make(chan op, 1)}
		current.Store(s)
		r.t = t
		ref := r.start()
		defer func() { must(t, r.DeleteSandbox(ctx(t), ref.Sandbox)) }()
		over := make(chan told, 1)
		go func() {
			got, err := readSession(ctx(t), r.Manager, ref, 0)
			if err != nil {
				t.Error(err)
			}
			over <- got
		}()
		for {
			select {
			case o := <-s.again:
				must(t, r.MachineHeld(ctx(t), ref.Sandbox))
				st, err := r.State(ref)
				must(t, err)
				r.guest.mu.Lock()
				r.guest.infos = []*guestv1.SessionInfo{s.meet(o, ref.Session, st.End)}
				r.guest.mu.Unlock()
				must(t, r.MachineReady(ctx(t), ref.Sandbox))
			case got := <-over:
				st, err := r.State(ref)
				must(t, err)
				s.compare(got, st)
				return
			}
		}
	})
}

// What an op does, and how its offset is meant.
const (
	sayOut = iota
	sayErr
	sayExit
	sayNothing
	breakOff  // end the stream
	meetAgain // say, on a new link, what is there: acknowledged, and size more produced
	whatOps
)

const (
	here = iota
	back
	ahead
	last // from the last offset there is
	exactly
	whereOps
)

type op struct {
	what, where byte
	by          uint32
	size        uint16
}

const opSize = 8

func (o op) encode() []byte {
	b := binary.BigEndian.AppendUint32([]byte{o.what, o.where}, o.by)
	return binary.BigEndian.AppendUint16(b, o.size)
}

func (o op) offset(at uint64) uint64 {
	switch o.where % whereOps {
	case back:
		return at - min(at, uint64(o.by))
	case ahead:
		return at + uint64(o.by)
	case last:
		return 1<<64 - 1 - uint64(o.by)
	case exactly:
		return uint64(o.by)
	}
	return at
}

// scripted is a guest that does what its script says, and the model of what is
// to come of that.
type scripted struct {
	t      *testing.T
	script []byte
	again  chan op

	mu    sync.Mutex
	ops   int // done
	stops int
	at    uint64
	log   []byte // of both streams, without what is skipped
	tags  []byte // for each byte of log its stream
	gap   uint64 // in all
	end   Kind   // "" while nothing has ended it
	code  int
}

func (s *scripted) next() (o op, ok bool) {
	if s.ops++; len(s.script) < opSize || s.ops > 50 {
		return op{}, false
	}
	b := s.script
	s.script = b[opSize:]
	o = op{b[0] % whatOps, b[1], binary.BigEndian.Uint32(b[2:]), binary.BigEndian.Uint16(b[6:])}
	if o.what >= breakOff { // each is followed by a pause
		if s.stops++; s.stops > 3 || s.end != "" {
			return s.next()
		}
	}
	return o, true
}

func (s *scripted) follow(from uint64, stream *connect.ServerStream[guestv1.Event]) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if from != s.at {
		s.t.Errorf("followed from %d, not from %d", from, s.at)
	}
	for {
		o, ok := s.next()
		if !ok {
			break
		}
		switch o.what {
		case breakOff:
			return nil
		case meetAgain:
			s.again <- o
			return nil
		}
		if err := s.say(o, stream); err != nil {
			return nil // it has heard enough
		}
	}
	if s.end != "" {
		return nil
	}
	return s.say(op{what: sayExit}, stream)
}

// say sends one event, and notes what is to come of it.
func (s *scripted) say(o op, stream *connect.ServerStream[guestv1.Event]) error {
	ev := &guestv1.Event{Offset: o.offset(s.at)}
	data := make([]byte, int(o.size)<<5) // more than an event may have, too
	if o.size < 1<<12 {
		data = data[:o.size]
	}
	for i := range data {
		data[i] = byte(ev.Offset+uint64(i)) ^ byte(s.ops)
	}
	switch o.what {
	case sayOut:
		ev.Event = &guestv1.Event_Stdout{Stdout: data}
	case sayErr:
		ev.Event = &guestv1.Event_Stderr{Stderr: data}
	case sayExit:
		words := strings.ToValidUTF8(string(data), "\u20ac") // else it can't be sent
		ev.Event = &guestv1.Event_Exit{Exit: &guestv1.Exit{Code: int32(o.by), Signal: int32(o.size), Reason: words, Message: words}}
	}
	if s.end == "" {
		s.expect(o, ev.Offset, data)
	}
	return stream.Send(ev)
}

func (s *scripted) expect(o op, offset uint64, data []byte) {
	output := o.what == sayOut || o.what == sayErr
	switch {
	case offset > s.at, o.what == sayExit && offset != s.at, output && len(data) > maxEvent:
		s.end = KindLost
	case o.what == sayExit:
		s.end, s.code = KindExit, int(min(max(int32(o.by), 0), 255))
	case output && s.at-offset < uint64(len(data)):
		data = data[s.at-offset:]
		s.log, s.tags = append(s.log, data...), append(s.tags, bytes.Repeat([]byte{o.what}, len(data))...)
		s.at += uint64(len(data))
	}
}

// meet is what the guest says of the session after its link broke. The host has
// taken what comes before end; the rest was on its way.
func (s *scripted) meet(o op, id string, end uint64) *guestv1.SessionInfo {
	s.mu.Lock()
	defer s.mu.Unlock()
	if end > s.at || s.at-end > uint64(len(s.log)) {
		s.t.Errorf("%d bytes are there of %d", end, s.at)
		return &guestv1.SessionInfo{}
	}
	kept := len(s.log) - int(s.at-end)
	s.log, s.tags, s.at = s.log[:kept], s.tags[:kept], end
	info := &guestv1.SessionInfo{Session: id, Acked: o.offset(end)}
	info.Produced = info.Acked + uint64(o.size)
	switch {
	case end > info.Produced:
		s.end = KindLost
	case info.Acked > end && info.Acked <= info.Produced && info.Acked > maxOffset:
		s.end = KindLost
	case info.Acked > end && info.Acked <= info.Produced:
		s.gap, s.at = s.gap+info.Acked-end, info.Acked
	}
	return info
}

func (s *scripted) compare(got told, st State) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out, errs []byte
	for i, c := range s.log {
		if s.tags[i] == sayOut {
			out = append(out, c)
		} else {
			errs = append(errs, c)
		}
	}
	var gap uint64
	for _, g := range got.gaps {
		gap += g[1] - g[0]
	}
	if !bytes.Equal(got.all, s.log) || !bytes.Equal(got.out, out) || !bytes.Equal(got.err, errs) || gap != s.gap {
		s.t.Errorf("%d bytes and a gap of %d, not %d and %d", len(got.all), gap, len(s.log), s.gap)
	}
	if got.last.Kind != s.end || got.last.Offset != s.at || st.End != s.at {
		s.t.Errorf("it ended with %s at %d (%d), not with %s at %d", got.last.Kind, got.last.Offset, st.End, s.end, s.at)
	}
	if x := got.last.Exit; x != nil && (x.Code != s.code || x.Signal < 0 || x.Signal > 64 || len(x.Message) > 4*maxMessage || !utf8.ValidString(x.Message) || len(x.Reason) > 20) {
		s.t.Errorf("%+v", x)
	}
	if l := got.last.Loss; l != nil && (len(l.Detail) > 4*maxMessage || !utf8.ValidString(l.Detail)) {
		s.t.Errorf("%+v", l)
	}
	if n := uint64(st.LogBytes); n > uint64(len(s.log))+4096*uint64(s.ops+2) {
		s.t.Errorf("%d bytes on disk for %d", n, len(s.log))
	}
}
