package node

import (
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"cloche.dev/cloche/internal/sandbox"
	"cloche.dev/cloche/internal/sys"
)

// journal is the durable record of one machine: STATE/machines/ID/machine.json.
// It holds the guest's key, so it is 0600 below a 0700 directory.
type journal struct {
	Request  sandbox.MachineRequest `json:"request"`
	Driver   string                 `json:"driver"`
	Guest    string                 `json:"guest"` // hash of the guest binary
	Key      []byte                 `json:"key"`   // what the agent proves its hellos with
	Welcomed bool                   `json:"welcomed"`
	Epoch    uint64                 `json:"epoch"`
	Done     bool                   `json:"done"`    // bring-up ended well
	BootID   string                 `json:"boot_id"` // of the host
	End      *sandbox.End           `json:"end,omitempty"`
}

const journalFile = "machine.json"

func newJournal(req sandbox.MachineRequest, driverName, guest, bootID string) *journal {
	key := make([]byte, 32)
	rand.Read(key)
	return &journal{Request: req, Driver: driverName, Guest: guest, Key: key, Epoch: 1, BootID: bootID}
}

// save writes the journal so that a crash leaves the old one or the new one.
func (j *journal) save(dir string) error {
	data, err := json.Marshal(j)
	if err != nil {
		return fmt.Errorf("encode the machine's journal: %w", err)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("make the machine's directory: %w", err)
	}
	return sys.WriteFileAtomic(filepath.Join(dir, journalFile), data, 0o600)
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
