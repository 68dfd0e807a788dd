package e2e

import (
	"bufio"
	"bytes"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestGatewayHoldsNoKeys reads the memory of the gateway, which is where hostile
// TLS and HTTP are parsed: of all that is secret on this host it has the secrets
// of live profiles, which shows that the search finds things, and no key.
func TestGatewayHoldsNoKeys(t *testing.T) {
	o := goOutside(t)
	live, idle := "live-secret-7d1f0a52c3", "idle-secret-90be44d1a7"
	o.secret(t, "live", live)
	o.secret(t, "idle", idle)
	for name, secret := range map[string]string{"injects": "live", "unused": "idle"} {
		o.profile(t, fmt.Sprintf(`{"name": %q, "default": "deny", "rules": [{"action": "inject", "hosts": ["site.test"], "inject": [{"secret": %q, "kind": "header"}]}]}`, name, secret))
	}
	box := create(t, o.Daemon, "--egress", "injects")
	if got, _ := o.fetch(t, box, "https://site.test/hello"); got != "hello from site.test" {
		t.Fatalf("a request with a secret: %q", got)
	}
	gateway := o.gateway(t)
	if !inMemory(t, gateway, []byte(live)) {
		t.Error("the secret of a live profile is not found in the gateway's memory: the search proves nothing")
	}
	if inMemory(t, gateway, []byte(idle)) {
		t.Error("the secret of a profile that no sandbox has is in the gateway's memory")
	}
	for _, name := range []string{"admin.key", "token.key", "secret.key"} {
		key, err := os.ReadFile(filepath.Join(o.State, name))
		if err != nil {
			t.Fatal(err)
		}
		key = bytes.TrimSpace(key)
		forms := [][]byte{key}
		if raw, err := hex.DecodeString(string(key)); err == nil {
			forms = append(forms, raw)
		}
		for _, form := range forms {
			if inMemory(t, gateway, form) {
				t.Errorf("%s is in the gateway's memory", name)
			}
		}
	}
}

func (o *outside) secret(t testing.TB, name, value string) {
	t.Helper()
	cmd := o.Command(t.Context(), "secret", "set", name, "--host", "site.test")
	cmd.Stdin = strings.NewReader(value)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("make a secret: %v\n%s", err, out)
	}
}

// inMemory looks for bytes in all that a process can write to.
func inMemory(t testing.TB, pid int, want []byte) bool {
	t.Helper()
	maps, err := os.Open(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		t.Fatal(err)
	}
	defer maps.Close()
	mem, err := os.Open(fmt.Sprintf("/proc/%d/mem", pid))
	if err != nil {
		t.Fatal(err)
	}
	defer mem.Close()
	read := 0
	for lines := bufio.NewScanner(maps); lines.Scan(); {
		var from, to int64
		var mode string
		if _, err := fmt.Sscanf(lines.Text(), "%x-%x %s", &from, &to, &mode); err != nil || !strings.HasPrefix(mode, "rw") {
			continue
		}
		const piece = 16 << 20
		for at := from; at < to; at += piece {
			b := make([]byte, min(piece+int64(len(want)), to-at))
			n, _ := mem.ReadAt(b, at) // what was given back meanwhile can't be read
			read += n
			if bytes.Contains(b[:n], want) {
				return true
			}
		}
	}
	if read == 0 {
		t.Fatal("nothing of the process's memory could be read")
	}
	return false
}
