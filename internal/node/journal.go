package node

import (
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"cloche.dev/cloche/internal/node/snapshot"
	"cloche.dev/cloche/internal/sandbox"
	"cloche.dev/cloche/internal/sys"
)

// journal is the durable record of one machine: STATE/machines/ID/machine.json.
// It holds the guest's key, so it is 0600 below a 0700 directory.
type journal struct {
	Request   sandbox.MachineRequest `json:"request"` // its generation is the machine's epoch
	Driver    string                 `json:"driver"`
	Guest     string                 `json:"guest"` // hash of the guest binary
	Key       []byte                 `json:"key"`   // what the agent proves its hellos with
	Welcomed  bool                   `json:"welcomed"`
	Epoch     uint64                 `json:"epoch"`                // that the agent was told
	GuestBoot string                 `json:"guest_boot,omitempty"` // the boot id that the guest sees
	Origin    string                 `json:"origin,omitempty"`     // the sandbox that its snapshot was taken of
	MaxProcs  uint64                 `json:"max_procs,omitempty"`
	Sessions  []sandbox.Session      `json:"sessions,omitempty"` // that went on from another timeline
	Egress    bool                   `json:"egress,omitempty"`   // it was made with a gateway; those of earlier releases were not
	CA        []byte                 `json:"ca,omitempty"`       // certificate of its project's authority, as it was then
	Done      bool                   `json:"done"`               // bring-up ended well
	BootID    string                 `json:"boot_id"`            // of the host
	End       *sandbox.End           `json:"end,omitempty"`
	// Replaces is the record of the machine that was ended for this one, until
	// this one is done: if it never is, that is what happened to the sandbox.
	Replaces *journal `json:"replaces,omitempty"`
}

const journalFile = "machine.json"

func newKey() []byte {
	key := make([]byte, 32)
	rand.Read(key)
	return key
}

// save writes the journal so that a crash leaves the old one or the new one.
func (j *journal) save(dir string) error {
	data, err := json.Marshal(j)
	if err != nil {
		return fmt.Errorf("encode the machine's journal: %w", err)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return snapshot.DiskError(fmt.Errorf("make the machine's directory: %w", err))
	}
	return snapshot.DiskError(sys.WriteFileAtomic(filepath.Join(dir, journalFile), data, 0o600))
}

// loadJournal returns nil where there is none. One that can't be read back is
// an error: somebody must look, since it roots a machine.
func loadJournal(dir string) (*journal, error) {
	data, err := os.ReadFile(filepath.Join(dir, journalFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the machine's journal: %w", err)
	}
	var j journal
	if err := json.Unmarshal(data, &j); err != nil {
		return nil, fmt.Errorf("decode the machine's journal in %s: %w", dir, err)
	}
	return &j, nil
}

// wish is how a machine is to be while it lives. It is a file of its own
// because it is not synced: a host that goes down ends the machine, so that all
// a crash can spoil here is worth nothing any more, and a journal that a crash
// spoiled would be in everybody's way.
type wish struct {
	Paused bool   `json:"paused,omitempty"` // the user's
	Held   string `json:"held,omitempty"`   // the snapshot that it stands still for, to be released after it
	Fence  int64  `json:"fence,omitempty"`  // the newest generation seen when this was written
}

const wishFile = "wish.json"

func (w wish) save(dir string) error {
	data, err := json.Marshal(w)
	if err != nil {
		return err
	}
	tmp := filepath.Join(dir, "."+wishFile)
	err = os.WriteFile(tmp, data, 0o600)
	if err == nil {
		err = os.Rename(tmp, filepath.Join(dir, wishFile))
	}
	if err != nil {
		return snapshot.DiskError(fmt.Errorf("note how the machine is to be: %w", err))
	}
	return nil
}

// loadWish returns the zero wish where none can be read.
func loadWish(dir string) wish {
	var w wish
	data, err := os.ReadFile(filepath.Join(dir, wishFile))
	if err != nil || json.Unmarshal(data, &w) != nil {
		return wish{}
	}
	return w
}
