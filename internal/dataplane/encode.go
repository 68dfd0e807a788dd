package dataplane

import (
	"bufio"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"strconv"

	"cloche.dev/cloche/api"
)

// The forms of a session's stream.
const (
	eventStream = "text/event-stream"
	octets      = "application/octet-stream"
	jsonForm    = "application/json"
)

// sse writes server-sent events.
type sse struct {
	w       *bufio.Writer
	scratch []byte
}

func (s *sse) output(kind api.StreamEventType, offset uint64, data []byte) error {
	b := s.head(string(kind), offset+uint64(len(data)))
	b = append(b, `{"type":"`...)
	b = append(b, kind...)
	b = append(b, `","offset":`...)
	b = strconv.AppendUint(b, offset, 10)
	b = append(b, `,"data":"`...)
	b = base64.StdEncoding.AppendEncode(b, data)
	return s.send(append(b, `"}`...))
}

func (s *sse) event(ev api.StreamEvent, next uint64) error {
	body, err := json.Marshal(ev)
	if err != nil {
		return err
	}
	return s.send(append(s.head(string(ev.Type), next), body...))
}

func (s *sse) head(kind string, next uint64) []byte {
	b := append(s.scratch[:0], "event: "...)
	b = append(b, kind...)
	b = append(b, "\nid: "...)
	b = strconv.AppendUint(b, next, 10)
	return append(b, "\ndata: "...)
}

func (s *sse) send(b []byte) error {
	s.scratch = append(b, "\n\n"...)
	_, err := s.w.Write(s.scratch)
	return err
}

// frameTypes are the first bytes of frames.
var frameTypes = map[api.StreamEventType]byte{
	api.EventStdout: 1, api.EventStderr: 2, api.EventStarted: 3, api.EventExit: 4, api.EventGap: 5, api.EventLost: 6, api.EventHeartbeat: 7, api.EventError: 8,
}

// frames writes binary frames: u8 type, u64 offset, u32 length, payload.
type frames struct {
	w *bufio.Writer
}

func (f *frames) output(kind api.StreamEventType, offset uint64, data []byte) error {
	return f.frame(kind, offset, data)
}

func (f *frames) event(ev api.StreamEvent, _ uint64) error {
	if ev.Type == api.EventHeartbeat {
		return f.frame(ev.Type, uint64(ev.Offset), nil)
	}
	body, err := json.Marshal(ev)
	if err != nil {
		return err
	}
	return f.frame(ev.Type, uint64(ev.Offset), body)
}

func (f *frames) frame(kind api.StreamEventType, offset uint64, payload []byte) error {
	var head [13]byte
	head[0] = frameTypes[kind]
	binary.BigEndian.PutUint64(head[1:], offset)
	binary.BigEndian.PutUint32(head[9:], uint32(len(payload)))
	if _, err := f.w.Write(head[:]); err != nil {
		return err
	}
	_, err := f.w.Write(payload)
	return err
}
