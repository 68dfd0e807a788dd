package client

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"cloche.dev/cloche/api"
)

// The frames of a session's log as application/octet-stream: a head of 13
// bytes (type, offset, length; big endian) and a payload.
const (
	frameHead       = 13
	maxFramePayload = 1 << 20
)

// frameTypes are the events by their type byte.
var frameTypes = [...]api.StreamEventType{
	1: api.EventStdout, 2: api.EventStderr, 3: api.EventStarted, 4: api.EventExit,
	5: api.EventGap, 6: api.EventLost, 7: api.EventHeartbeat, 8: api.EventError,
}

// errFrame is what a stream that is not one of frames gives.
var errFrame = errors.New("the stream is not one of Cloche's frames")

// readFrame reads one frame. buf is grown as needed and returned for the next
// call; the event's Data lies in it. When the stream is cut inside a frame of
// output, what has come of it is returned as a shorter frame with a nil error:
// the next call then meets the cut.
func readFrame(r io.Reader, buf []byte) (api.StreamEvent, []byte, error) {
	var head [frameHead]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return api.StreamEvent{}, buf, err
	}
	n := int(binary.BigEndian.Uint32(head[9:]))
	offset := int64(binary.BigEndian.Uint64(head[1:]))
	if head[0] == 0 || int(head[0]) >= len(frameTypes) || n > maxFramePayload || offset < 0 {
		return api.StreamEvent{}, buf, errFrame
	}
	e := api.StreamEvent{Type: frameTypes[head[0]], Offset: offset}
	if cap(buf) < n {
		buf = make([]byte, max(n, 64<<10))
	}
	got, err := io.ReadFull(r, buf[:n])
	switch e.Type {
	case api.EventStdout, api.EventStderr:
		if err != nil && got == 0 {
			return e, buf, err
		}
		e.Data = buf[:got]
		return e, buf, nil
	case api.EventHeartbeat:
		return e, buf, err
	}
	if err != nil {
		return e, buf, err
	}
	var body api.StreamEvent
	if err := json.Unmarshal(buf[:n], &body); err != nil {
		return e, buf, fmt.Errorf("%w: %w", errFrame, err)
	}
	body.Type, body.Offset, body.Data = e.Type, e.Offset, nil
	return body, buf, nil
}
