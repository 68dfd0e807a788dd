package trust_test

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"software.sslmate.com/src/go-pkcs12"

	"cloche.dev/cloche/internal/sandbox"
	"cloche.dev/cloche/internal/trust"
)

// authority is a new self-signed authority.
func authority(t *testing.T, name string) []byte {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

func TestStore(t *testing.T) {
	a, b := authority(t, "same name"), authority(t, "same name")
	noise := []byte("# a comment\n-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
	p12, err := trust.Store(append(noise, a...), append(b, a...))
	if err != nil {
		t.Fatal(err)
	}
	certs, err := pkcs12.DecodeTrustStore(p12, trust.Password)
	if err != nil || len(certs) != 2 || certs[0].Subject.CommonName != "same name" {
		t.Fatal(certs, err)
	}
	if again, err := trust.Store(a, b); err != nil || !bytes.Equal(again, p12) {
		t.Error("not the same twice", err)
	}
	if other, err := trust.Store(b, a); err != nil || bytes.Equal(other[len(other)-100:], p12[len(p12)-100:]) {
		t.Error("another order is the same store", err)
	}
	if _, err := trust.Store(noise); !sandbox.IsClass(err, sandbox.Invalid) {
		t.Error(err)
	}
}

// TestJava: Java itself finds every certificate in the store, as one to trust.
func TestJava(t *testing.T) {
	keytool, err := exec.LookPath("keytool")
	if err != nil {
		t.Skip("SKIP: no Java here")
	}
	p12, err := trust.Store(authority(t, "one"), authority(t, "one"), authority(t, "Ünï"))
	file := filepath.Join(t.TempDir(), "trust.p12")
	if err != nil || os.WriteFile(file, p12, 0o600) != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(t.Context(), keytool, "-J-Xshare:auto", "-list", "-keystore", file, "-storetype", "PKCS12", "-storepass", trust.Password).CombinedOutput()
	if err != nil || strings.Count(string(out), "trustedCertEntry") != 3 {
		t.Errorf("%v: %s", err, out)
	}
}

func TestHostRoots(t *testing.T) {
	dir := t.TempDir()
	a, b := authority(t, "a"), authority(t, "b")
	file := filepath.Join(dir, "roots.pem")
	if err := os.WriteFile(file, []byte("# comment\n"+string(a)+"more\n"+string(b)), 0o600); err != nil {
		t.Fatal(err)
	}
	if got, err := trust.HostRoots(file); err != nil || string(got) != string(a)+string(b) {
		t.Errorf("%s %v", got, err)
	}
	empty, huge := filepath.Join(dir, "empty"), filepath.Join(dir, "huge")
	if os.WriteFile(empty, []byte("nothing"), 0o600) != nil || os.WriteFile(huge, make([]byte, 9<<20), 0o600) != nil {
		t.Fatal("can't write")
	}
	for _, name := range []string{empty, huge, dir, filepath.Join(dir, "missing")} {
		if _, err := trust.HostRoots(name); !sandbox.IsClass(err, sandbox.FailedPrecondition) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := os.Stat("/etc/ssl/certs/ca-certificates.crt"); err != nil {
		t.Skip("SKIP: this host has no bundle")
	}
	if got, err := trust.HostRoots(""); err != nil || bytes.Count(got, []byte("BEGIN CERTIFICATE")) < 10 {
		t.Errorf("%d bytes, %v", len(got), err)
	} else if p12, err := trust.Store(a, got); err != nil || len(p12) > 1<<20 {
		t.Errorf("%d bytes, %v", len(p12), err)
	} else {
		t.Logf("%d bytes of PEM, a store of %d", len(got), len(p12))
	}
}
