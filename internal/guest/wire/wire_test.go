package wire

import (
	"bytes"
	"errors"
	"io"
	"reflect"
	"testing"
)

var samples = map[Op]Message{
	OpState:    &State{Key: []byte("k"), Epoch: 7, Setup: []byte{0, 1}, MaxProcs: 9, HooksFor: 3, HooksDone: true, Hooks: []byte("h")},
	OpStart:    &Start{Session: "s", Path: "/p", Args: []string{"a", ""}, Env: []string{"A=b"}, Dir: "/", UID: 1, GID: 2, Groups: []string{"3"}, Stdin: true, TTY: true, Rows: 4, Cols: 5, TimeoutMS: -6, FailCode: 7, FailText: "t"},
	OpFetch:    &Fetch{Session: "s", Offset: 1 << 40},
	OpReply:    &Fetched{Runs: []Run{{false, 2}, {true, 3}}, Exited: true, Exit: Exit{Code: 1, Signal: 2, Reason: "r", Text: "t", UnixNano: 3}, Data: []byte("abcde")},
	OpAck:      &Ack{Session: "s", Offset: 5, Exit: true},
	OpStdin:    &Stdin{Session: "s", Offset: 5, Data: []byte("x"), Close: true},
	OpSignal:   &Signal{Session: "s", Signal: 9},
	OpResize:   &Resize{Session: "s", Rows: 1, Cols: 2},
	OpSessions: &Sessions{List: []Session{{ID: "a", PID: 3, Exited: true, Acked: 1, Produced: 2}}},
	OpError:    &Error{Class: "c", Code: "d", Text: "e"},
}

func TestRoundTrip(t *testing.T) {
	for op, m := range samples {
		f, err := Read(bytes.NewReader(AppendFrame(nil, op, 42, m)))
		if err != nil || f.Op != op || f.ID != 42 {
			t.Fatalf("%d: %+v %v", op, f, err)
		}
		got := reflect.New(reflect.TypeOf(m).Elem()).Interface().(Message)
		if err := Unmarshal(f.Body, got); err != nil || !reflect.DeepEqual(got, m) {
			t.Errorf("%d: %+v %v", op, got, err)
		}
	}
}

// FuzzRead holds the reader to its bounds, and every decoder to end in a value
// or in ErrFrame.
func FuzzRead(f *testing.F) {
	for op, m := range samples {
		f.Add(AppendFrame(nil, op, 1, m))
	}
	f.Add([]byte{0xff, 0xff, 0xff, 0xff, 1, 0, 0, 0, 0, 0, 0, 0, 0})
	f.Fuzz(func(t *testing.T, data []byte) {
		fr, err := Read(bytes.NewReader(data))
		if err != nil {
			if !errors.Is(err, ErrFrame) && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
				t.Fatal(err)
			}
			return
		}
		for _, m := range samples {
			got := reflect.New(reflect.TypeOf(m).Elem()).Interface().(Message)
			if err := Unmarshal(fr.Body, got); err != nil && !errors.Is(err, ErrFrame) {
				t.Fatal(err)
			}
		}
	})
}
