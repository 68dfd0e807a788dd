package firecracker

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	"cloche.dev/cloche/internal/sandbox"
	"cloche.dev/cloche/internal/sys"
)

// record is what is known of a machine beyond this process. It is written
// before what it tells of, so that what is there is always in it.
type record struct {
	ID        string            `json:"id"`
	UID       int               `json:"uid,omitempty"` // of the jail
	Version   string            `json:"version"`       // of Firecracker
	Hash      string            `json:"hash"`          // of its binary
	Resources sandbox.Resources `json:"resources"`
	Process   sys.Process       `json:"process"` // the VMM; zero until it runs
	// Ready: Create or Restore has returned it, or is about to.
	Ready bool `json:"ready,omitempty"`
	// Held: it stands still for a snapshot alone, and is to go on after it,
	// whoever finds it.
	Held bool `json:"held,omitempty"`
	// Saving: its VMM is asked for an image of a machine that stood still before,
	// and is to stay so.
	Saving bool         `json:"saving,omitempty"`
	End    *sandbox.End `json:"end,omitempty"`
}

// writing tells whether the VMM may be writing an image. It answers nothing until
// it has.
func (r record) writing() bool { return r.Held || r.Saving }

const (
	recordName = "machine.json"
	diskName   = "disk"
)

// save writes the record, whole or not at all. It is not synced: after a crash
// of the host there is no machine any more that it could tell of.
func (r record) save(dir string) error {
	data, err := json.Marshal(r)
	if err != nil {
		return err
	}
	tmp := filepath.Join(dir, "."+recordName)
	if err := os.WriteFile(tmp, data, 0o600); err != nil {
		return fmt.Errorf("write the machine's record: %w", err)
	}
	return os.Rename(tmp, filepath.Join(dir, recordName))
}

func readRecord(dir string) (record, error) {
	var r record
	data, err := os.ReadFile(filepath.Join(dir, recordName))
	if err != nil {
		return r, err
	}
	return r, json.Unmarshal(data, &r)
}
