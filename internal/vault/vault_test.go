package vault_test

import (
	"bytes"
	"encoding/base64"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"cloche.dev/cloche/internal/sandbox"
	"cloche.dev/cloche/internal/vault"
)

func open(t *testing.T, o vault.Options) *vault.Vault {
	t.Helper()
	v, err := vault.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func codeOf(err error) string {
	var e *sandbox.Error
	if errors.As(err, &e) {
		return e.Code
	}
	return ""
}

// TestSeal: what was sealed opens for the same project and id only, with the
// same key only, and only if no bit of it was changed.
func TestSeal(t *testing.T) {
	file := filepath.Join(t.TempDir(), "vault.key")
	v := open(t, vault.Options{KeyFile: file})
	if st, err := os.Stat(file); err != nil || st.Mode().Perm() != 0o600 {
		t.Fatal(st, err)
	}
	plain := []byte("the canary's value")
	sealed, err := v.Seal(t.Context(), "prj_a", "sec_b", plain)
	if err != nil || bytes.Contains(sealed, []byte("canary")) {
		t.Fatal(err)
	}
	again, err := v.Seal(t.Context(), "prj_a", "sec_b", plain)
	if err != nil || bytes.Equal(sealed, again) || bytes.Equal(sealed[3:40], again[3:40]) {
		t.Fatal("sealed the same way twice", err)
	}
	v = open(t, vault.Options{KeyFile: file}) // as after a restart
	if got, err := v.Open(t.Context(), "prj_a", "sec_b", sealed); !bytes.Equal(got, plain) || err != nil {
		t.Fatal(got, err)
	}
	for _, w := range [][2]string{{"prj_a", "sec_c"}, {"prj_c", "sec_b"}, {"prj_as", "ec_b"}, {"", "prj_asec_b"}} {
		if _, err := v.Open(t.Context(), w[0], w[1], sealed); codeOf(err) != "vault_damaged" {
			t.Error(w, err)
		}
	}
	for n := range sealed {
		bad := bytes.Clone(sealed)
		bad[n] ^= 1
		if got, err := v.Open(t.Context(), "prj_a", "sec_b", bad); err == nil {
			t.Errorf("byte %d: %q", n, got)
		}
		if _, err := v.Open(t.Context(), "prj_a", "sec_b", sealed[:n]); err == nil {
			t.Errorf("%d bytes opened", n)
		}
	}
	other := open(t, vault.Options{KeyFile: filepath.Join(t.TempDir(), "k")})
	if _, err := other.Open(t.Context(), "prj_a", "sec_b", sealed); codeOf(err) != "vault_key" {
		t.Error(err)
	}
	empty, err := v.Seal(t.Context(), "p", "i", nil)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := v.Open(t.Context(), "p", "i", empty); len(got) != 0 || err != nil {
		t.Error(got, err)
	}
	if _, err := v.Seal(t.Context(), "p", "i", make([]byte, 2<<20)); codeOf(err) != "secret_too_large" {
		t.Error(err)
	}
}

// TestKeyFile: one that others can read, or that holds something else, is
// refused and left as it is.
func TestKeyFile(t *testing.T) {
	good := base64.StdEncoding.EncodeToString(bytes.Repeat([]byte{7}, 32))
	for _, c := range []struct {
		name, content string
		mode          os.FileMode
		ok            bool
	}{
		{"good", good, 0o400, true},
		{"with newline", good + "\n", 0o600, true},
		{"readable", good, 0o640, false},
		{"short", good[:20], 0o600, false},
		{"empty", "", 0o600, false},
		{"endless", strings.Repeat("A", 10000), 0o600, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "key")
			if err := errors.Join(os.WriteFile(file, []byte(c.content), 0o600), os.Chmod(file, c.mode)); err != nil {
				t.Fatal(err)
			}
			_, err := vault.Open(vault.Options{KeyFile: file})
			if c.ok != (err == nil) || err != nil && (codeOf(err) != "vault_key" || strings.Contains(err.Error(), good[:8])) {
				t.Error(err)
			}
			if b, _ := os.ReadFile(file); string(b) != c.content {
				t.Error("the file was changed")
			}
		})
	}
	if _, err := vault.Open(vault.Options{KeyFile: t.TempDir()}); codeOf(err) != "vault_key" {
		t.Error(err)
	}
	if _, err := vault.Open(vault.Options{KeyFile: filepath.Join(t.TempDir(), "no", "dir")}); codeOf(err) != "vault_key" {
		t.Error(err)
	}
	if _, err := vault.Open(vault.Options{}); codeOf(err) != "vault_key" {
		t.Error(err)
	}
}

// TestKeyRace: all that start at once have the same key.
func TestKeyRace(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "key")
	vaults := make([]*vault.Vault, 16)
	var wg sync.WaitGroup
	for n := range vaults {
		wg.Go(func() { vaults[n], _ = vault.Open(vault.Options{KeyFile: file}) })
	}
	wg.Wait()
	sealed, err := vaults[0].Seal(t.Context(), "p", "i", []byte("x"))
	if err != nil {
		t.Fatal(err)
	}
	for _, v := range vaults {
		if got, err := v.Open(t.Context(), "p", "i", sealed); string(got) != "x" || err != nil {
			t.Error(err)
		}
	}
	if list, _ := os.ReadDir(dir); len(list) != 1 {
		t.Error(list)
	}
}

// hook is a key command: it "encrypts" by reversing the text.
func hook(t *testing.T, script string) []string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "hook")
	if err := os.WriteFile(file, []byte("#!/bin/sh\n"+script), 0o700); err != nil {
		t.Fatal(err)
	}
	return []string{file, "--key=1"}
}

const reverse = `read -r in; [ "$1" = --key=1 ] || exit 3
case $2 in
wrap) printf '%s %s %s' "$CLOCHE_PROJECT" "$CLOCHE_SECRET" "$(printf %s "$in" | rev)" | base64 -w0 ;;
unwrap) set -- $(printf %s "$in" | base64 -d); [ "$1 $2" = "$CLOCHE_PROJECT $CLOCHE_SECRET" ] || exit 4; printf %s "$3" | rev ;;
esac
`

func TestCommand(t *testing.T) {
	file := filepath.Join(t.TempDir(), "vault.key")
	v := open(t, vault.Options{KeyFile: file, Command: hook(t, reverse)})
	if _, err := os.Stat(file); err == nil {
		t.Error("a key file was made")
	}
	sealed, err := v.Seal(t.Context(), "prj_a", "sec_b", []byte("value"))
	if err != nil {
		t.Fatal(err)
	}
	if got, err := v.Open(t.Context(), "prj_a", "sec_b", sealed); string(got) != "value" || err != nil {
		t.Fatal(err)
	}
	if _, err := v.Open(t.Context(), "prj_a", "sec_c", sealed); codeOf(err) != "vault_command" {
		t.Error(err)
	}
	plainly := open(t, vault.Options{KeyFile: file})
	if _, err := plainly.Open(t.Context(), "prj_a", "sec_b", sealed); codeOf(err) != "vault_key" {
		t.Error(err)
	}
	// What the key file sealed still opens beside a command.
	old, err := plainly.Seal(t.Context(), "p", "i", []byte("old"))
	if err != nil {
		t.Fatal(err)
	}
	if got, err := open(t, vault.Options{KeyFile: file, Command: hook(t, reverse)}).Open(t.Context(), "p", "i", old); string(got) != "old" || err != nil {
		t.Error(err)
	}
	if _, err := v.Open(t.Context(), "p", "i", old); codeOf(err) != "vault_key" {
		t.Error(err)
	}
}

// TestBadCommand: whatever a command does wrong, nothing is sealed, and no key
// is told.
func TestBadCommand(t *testing.T) {
	for name, script := range map[string]string{
		"fails": "exit 1\n", "says nothing": "true\n", "not base64": "echo '!'\n", "copies": "cat\n", "endless": "yes QUJD | tr -d '\\n'\n", "much": "head -c 100000 /dev/zero | base64 -w0\n",
		"leaves somebody behind": "sleep 60 2>&- &\necho QUJD\nexit 1\n",
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := open(t, vault.Options{Command: hook(t, script)}).Seal(t.Context(), "p", "i", []byte("value")); err == nil {
				t.Error("sealed")
			}
		})
	}
	if _, err := open(t, vault.Options{Command: []string{filepath.Join(t.TempDir(), "none")}}).Seal(t.Context(), "p", "i", nil); codeOf(err) != "vault_command" {
		t.Error(err)
	}
}

func FuzzOpen(f *testing.F) {
	v, err := vault.Open(vault.Options{KeyFile: filepath.Join(f.TempDir(), "key")})
	if err != nil {
		f.Fatal(err)
	}
	sealed, err := v.Seal(f.Context(), "p", "i", []byte("value"))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(sealed)
	f.Add([]byte{1, 0xff, 0xff})
	f.Add([]byte{2, 0, 1, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		got, err := v.Open(t.Context(), "p", "i", b)
		if err == nil && string(got) != "value" {
			t.Errorf("%x opened as %q", b, got)
		}
	})
}
