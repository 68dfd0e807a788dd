package engine

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"

	"cloche.dev/cloche/internal/node/driver/gvisor/enginerpc"
)

// rotating is a log file of bounded size: when it is full it becomes NAME.1,
// and the one before is dropped. It is not safe for concurrent use.
type rotating struct {
	path string
	max  int64
	f    *os.File
	size int64
}

func openRotating(path string, max int64) (*rotating, error) {
	r := &rotating{path: path, max: max}
	return r, r.open()
}

func (r *rotating) open() error {
	f, err := os.OpenFile(r.path, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	st, err := f.Stat()
	if err != nil {
		_ = f.Close()
		return err
	}
	r.f, r.size = f, st.Size()
	return nil
}

// Write implements io.Writer.
func (r *rotating) Write(p []byte) (int, error) {
	if r.size > 0 && r.size+int64(len(p)) > r.max {
		if err := r.f.Close(); err != nil {
			return 0, err
		}
		if err := os.Rename(r.path, r.path+".1"); err != nil {
			return 0, err
		}
		if err := r.open(); err != nil {
			return 0, err
		}
	}
	n, err := r.f.Write(p)
	r.size += int64(n)
	return n, err
}

// Close closes the file.
func (r *rotating) Close() error { return r.f.Close() }

// readTail returns the last max bytes of a file; "" when there is none.
func readTail(path string, max int64) string {
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return ""
	}
	buf := make([]byte, min(st.Size(), max))
	n, _ := f.ReadAt(buf, st.Size()-int64(len(buf)))
	return printable(string(buf[:n]))
}

// printable makes text that a guest may have written fit for a message.
func printable(s string) string {
	return strings.TrimSpace(strings.Map(func(r rune) rune {
		if r == '\n' || r == '\t' {
			return ' '
		}
		if r < ' ' || r == 0x7f || r >= 0x80 && r < 0xa0 {
			return -1
		}
		return r
	}, strings.ToValidUTF8(s, "?")))
}

// saveRecord replaces a machine's record. It need not survive a power loss,
// since no machine does.
func saveRecord(dir string, m enginerpc.Machine) error {
	data, err := json.Marshal(m)
	if err != nil {
		return err
	}
	path := filepath.Join(dir, enginerpc.RecordName)
	if err := os.WriteFile(path+".new", data, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

func loadRecord(dir string) (enginerpc.Machine, error) {
	var m enginerpc.Machine
	data, err := os.ReadFile(filepath.Join(dir, enginerpc.RecordName))
	if err != nil {
		return m, err
	}
	return m, json.Unmarshal(data, &m)
}

// removeState removes what gVisor keeps about a machine in its state
// directory.
func removeState(root, id string) error {
	var first error
	for _, name := range []string{
		"runsc-" + id + ".sock", id + "_sandbox:" + id + ".state", id + "_sandbox:" + id + ".lock",
	} {
		if err := os.Remove(filepath.Join(root, name)); err != nil && !errors.Is(err, os.ErrNotExist) && first == nil {
			first = err
		}
	}
	return first
}
