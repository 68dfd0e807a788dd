package auth_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"cloche.dev/cloche/internal/auth"
	"cloche.dev/cloche/internal/sandbox"
	"cloche.dev/cloche/internal/store/sqlite"
)

func open(t *testing.T) *sqlite.Store {
	t.Helper()
	s, err := sqlite.Open(context.Background(), filepath.Join(t.TempDir(), "cloche.db"), nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func bootstrap(t *testing.T, s *sqlite.Store, dir string) (auth.FirstRun, string) {
	t.Helper()
	run, err := auth.Bootstrap(t.Context(), s, dir, time.Now)
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(run.KeyFile)
	if err != nil && !run.Lost {
		t.Fatal(err)
	}
	return run, strings.TrimSpace(string(b))
}

func TestFirstStart(t *testing.T) {
	s, dir := open(t), t.TempDir()
	run, text := bootstrap(t, s, dir)
	if !run.NewKey || run.Lost {
		t.Errorf("first start: %+v", run)
	}
	st, err := os.Stat(run.KeyFile)
	if err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", st.Mode(), err)
	}
	caller, err := auth.NewVerifier(s).Verify(t.Context(), text)
	if err != nil || caller.Role != sandbox.RoleAdmin || caller.Project != run.Project.ID {
		t.Errorf("caller %+v, %v", caller, err)
	}
	again, text2 := bootstrap(t, s, dir)
	if again.NewKey || again.Lost || text2 != text || again.Project.ID != run.Project.ID {
		t.Errorf("second start: %+v", again)
	}
}

func TestLostAdminKey(t *testing.T) {
	s, dir := open(t), t.TempDir()
	run, old := bootstrap(t, s, dir)
	if err := os.Remove(run.KeyFile); err != nil {
		t.Fatal(err)
	}
	lost, _ := bootstrap(t, s, dir)
	if !lost.Lost || !strings.Contains(lost.Instruct, "admin.key.reset") {
		t.Fatalf("lost: %+v", lost)
	}
	if err := os.WriteFile(filepath.Join(dir, "admin.key.reset"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	fresh, text := bootstrap(t, s, dir)
	if !fresh.NewKey || fresh.Lost || text == old {
		t.Errorf("after the reset: %+v", fresh)
	}
	if _, err := os.Stat(filepath.Join(dir, "admin.key.reset")); !os.IsNotExist(err) {
		t.Error("the reset file is still there")
	}
	if _, err := auth.NewVerifier(s).Verify(t.Context(), text); err != nil {
		t.Error(err)
	}
}

// TestCrashBetweenFileAndRow: the file stands, its row was never inserted.
func TestCrashBetweenFileAndRow(t *testing.T) {
	s, dir := open(t), t.TempDir()
	text, _ := auth.Mint(sandbox.NewID(sandbox.KindKey))
	if err := os.WriteFile(filepath.Join(dir, "admin.key"), []byte(text+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	run, got := bootstrap(t, s, dir)
	if !run.NewKey || got != text {
		t.Errorf("%+v, the file was rewritten: %v", run, got != text)
	}
	if _, err := auth.NewVerifier(s).Verify(t.Context(), text); err != nil {
		t.Error(err)
	}
}

func TestExposedSecretIsRefused(t *testing.T) {
	s, dir := open(t), t.TempDir()
	run, _ := bootstrap(t, s, dir)
	if err := os.Chmod(run.KeyFile, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := auth.Bootstrap(t.Context(), s, dir, time.Now); !sandbox.IsClass(err, sandbox.FailedPrecondition) {
		t.Errorf("%v", err)
	}
}

func TestVerifyRefuses(t *testing.T) {
	s, dir := open(t), t.TempDir()
	run, text := bootstrap(t, s, dir)
	v := auth.NewVerifier(s)
	other, _ := auth.Mint(sandbox.NewID(sandbox.KindKey))
	stolen := text[:28] + other[28:] // a known id with another secret
	for name, bad := range map[string]string{
		"nothing": "", "unknown": other, "wrong secret": stolen, "short": text[:len(text)-1], "long": text + "a",
		"upper case": strings.ToUpper(text), "an id": "key_aaaaaaaaaaaaaaaaaaaa", "with a newline": text + "\n",
	} {
		_, err := v.Verify(t.Context(), bad)
		if e := sandbox.AsError(err); e == nil || e.Class != sandbox.Denied || e.Code != "unauthenticated" {
			t.Errorf("%s: %v", name, err)
		}
		if bad != "" && strings.Contains(fmt.Sprintf("%+v %s", err, err), bad) {
			t.Errorf("%s: the error holds the key", name)
		}
	}
	caller, err := v.Verify(t.Context(), text)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.RevokeKey(t.Context(), run.Project.ID, caller.KeyID, time.Now()); err != nil {
		t.Fatal(err)
	}
	if _, err := v.Verify(t.Context(), text); !sandbox.IsClass(err, sandbox.Denied) {
		t.Errorf("a revoked key passes: %v", err)
	}
}

func TestTokenKey(t *testing.T) {
	dir := t.TempDir()
	a, err := auth.LoadTokenKey(dir)
	if err != nil || len(a) != 32 {
		t.Fatal(a, err)
	}
	b, err := auth.LoadTokenKey(dir)
	if err != nil || string(a) != string(b) {
		t.Errorf("the key does not stay: %v", err)
	}
	path := filepath.Join(dir, "token.key")
	if st, err := os.Stat(path); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("%v %v", st, err)
	}
	if err := os.WriteFile(path, []byte("short"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := auth.LoadTokenKey(dir); !sandbox.IsClass(err, sandbox.FailedPrecondition) {
		t.Errorf("a damaged key: %v", err)
	}
}

func claims() (auth.Session, auth.Access) {
	prj := sandbox.NewID(sandbox.KindProject)
	return auth.Session{Project: prj, Session: sandbox.NewID(sandbox.KindSession), Generation: 7},
		auth.Access{Purpose: auth.PurposeFiles, Project: prj, Sandbox: sandbox.NewID(sandbox.KindSandbox), Expires: time.Unix(2_000_000_000, 0).UTC()}
}

func TestTokens(t *testing.T) {
	key := make([]byte, 32)
	tokens, others := auth.NewTokens(key), auth.NewTokens([]byte("another key of thirty-two bytes!"))
	ses, acc := claims()
	st, at := tokens.Session(ses), tokens.Access(acc)
	if got, err := tokens.VerifySession(st); err != nil || got != ses {
		t.Errorf("session: %+v %v", got, err)
	}
	now := acc.Expires.Add(-time.Second)
	if got, err := tokens.VerifyAccess(at, auth.PurposeFiles, now); err != nil || got != acc {
		t.Errorf("access: %+v %v", got, err)
	}
	refused := map[string]error{}
	_, refused["another key's session token"] = others.VerifySession(st)
	_, refused["another key's access token"] = others.VerifyAccess(at, auth.PurposeFiles, now)
	_, refused["another purpose"] = tokens.VerifyAccess(at, auth.PurposePorts, now)
	_, refused["purpose replaced"] = tokens.VerifyAccess(strings.Replace(at, "files", "ports", 1), auth.PurposePorts, now)
	_, refused["expired"] = tokens.VerifyAccess(at, auth.PurposeFiles, acc.Expires)
	_, refused["access as session"] = tokens.VerifySession(at)
	_, refused["session as access"] = tokens.VerifyAccess(st, auth.PurposeFiles, now)
	_, refused["prefix exchanged"] = tokens.VerifySession("cst_" + strings.TrimPrefix(at, "cat_"))
	for name, err := range refused {
		if !sandbox.IsClass(err, sandbox.Denied) {
			t.Errorf("%s: %v", name, err)
		} else if strings.Contains(err.Error(), st) || strings.Contains(err.Error(), at) {
			t.Errorf("%s: the error holds the token", name)
		}
	}
	// Every single changed character is noticed.
	for i := range st {
		b := []byte(st)
		b[i] = "ab"[b2i(b[i] == 'a')]
		if _, err := tokens.VerifySession(string(b)); err == nil {
			t.Fatalf("character %d can be changed", i)
		}
	}
}

func b2i(b bool) int {
	if b {
		return 1
	}
	return 0
}

func TestBearer(t *testing.T) {
	for in, want := range map[string]string{"Bearer x": "x", "bearer  x ": "x", "": "", "Bearer": "", "Basic x": ""} {
		if got := auth.Bearer(in); got != want {
			t.Errorf("Bearer(%q) = %q", in, got)
		}
	}
}

type noKeys struct{}

func (noKeys) KeyByID(context.Context, string) (sandbox.Key, error) {
	return sandbox.Key{}, sandbox.Errorf(sandbox.NotFound, "key_not_found", "no key")
}

func FuzzVerifyKey(f *testing.F) {
	text, _ := auth.Mint(sandbox.NewID(sandbox.KindKey))
	f.Add(text)
	f.Add("cloche__")
	v := auth.NewVerifier(noKeys{})
	f.Fuzz(func(t *testing.T, s string) {
		if _, err := v.Verify(context.Background(), s); !sandbox.IsClass(err, sandbox.Denied) {
			t.Errorf("%q: %v", s, err)
		}
	})
}

func FuzzVerifyTokens(f *testing.F) {
	tokens := auth.NewTokens(make([]byte, 32))
	ses, acc := claims()
	f.Add(tokens.Session(ses))
	f.Add(tokens.Access(acc))
	f.Add("cat_....")
	now := acc.Expires.Add(-time.Hour)
	f.Fuzz(func(t *testing.T, s string) {
		// What passes must be exactly what we would have made.
		if got, err := tokens.VerifySession(s); err == nil && tokens.Session(got) != s {
			t.Errorf("%q passes as %+v", s, got)
		}
		if got, err := tokens.VerifyAccess(s, auth.PurposeFiles, now); err == nil && tokens.Access(got) != s {
			t.Errorf("%q passes as %+v", s, got)
		}
	})
}
