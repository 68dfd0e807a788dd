package session

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"cloche.dev/cloche/internal/failpoint"
	"cloche.dev/cloche/internal/sandbox"
)

// meta is a session's file beside its log: its identity and, once known, its
// beginning and end. Between two writes of it the log's own records tell what
// happened, so that it may be a second behind.
type meta struct {
	Version  int             `json:"version"`
	Session  sandbox.Session `json:"session"`
	Guest    string          `json:"guest,omitempty"` // the guest's id of it; "": the session's own
	Epoch    int64           `json:"epoch,omitempty"` // of the machine that brought it along
	Status   Status          `json:"status"`
	Start    *Start          `json:"start,omitempty"`
	Exit     *Exit           `json:"exit,omitempty"`
	Loss     *Loss           `json:"loss,omitempty"`
	EndedAt  *time.Time      `json:"ended_at,omitempty"`
	First    uint64          `json:"first,omitempty"` // once ended
	End      uint64          `json:"end,omitempty"`   // once ended
	LogBytes int64           `json:"log_bytes,omitempty"`
}

const (
	metaName    = "meta.json"
	metaTmp     = "meta.json.tmp"
	metaVersion = 2 // version 1 knew neither Guest nor Epoch

	heldName = "held" // in a sandbox's directory: its machine was let go to be restored
)

// readMeta reads dir's meta file; the error is os.ErrNotExist when dir never
// became a session or is on its way out.
func readMeta(dir string) (*meta, error) {
	b, err := os.ReadFile(filepath.Join(dir, metaName))
	if err != nil {
		return nil, err
	}
	var m meta
	if err := json.Unmarshal(b, &m); err != nil {
		return nil, err
	}
	if m.Version < 1 || m.Version > metaVersion {
		return nil, fmt.Errorf("meta version %d is not known", m.Version)
	}
	return &m, nil
}

// writeMeta replaces dir's meta file: afterwards it is on disk whole, or not
// at all.
func writeMeta(dir string, m *meta) error {
	b, err := json.Marshal(m)
	if err != nil {
		return err
	}
	tmp := filepath.Join(dir, metaTmp)
	f, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return errors.Join(err, os.Remove(tmp))
	}
	if err := os.Rename(tmp, filepath.Join(dir, metaName)); err != nil {
		return err
	}
	failpoint.Hit("session.meta.written")
	return syncDir(dir)
}

// removeSession removes a session's directory, the meta file first: a
// directory without one is rubbish that the next start collects.
func removeSession(dir string) error {
	if err := os.Remove(filepath.Join(dir, metaName)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return os.RemoveAll(dir)
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
