package ca

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"testing"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

func generated(t *testing.T) (sandbox.Authority, *Authority) {
	t.Helper()
	pair, err := Generate("Cloche prj_a")
	if err != nil {
		t.Fatal(err)
	}
	a, err := New(pair)
	if err != nil {
		t.Fatal(err)
	}
	return pair, a
}

func TestLeaf(t *testing.T) {
	pair, a := generated(t)
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(pair.Cert) {
		t.Fatal("the certificate isn't PEM")
	}
	long := "a.very.long.name.that.does.not.fit.into.a.common.name.of.64.bytes.example.test"
	for _, host := range []string{"a.test", long} {
		leaf, err := a.Leaf(host)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := leaf.Leaf.Verify(x509.VerifyOptions{DNSName: host, Roots: roots}); err != nil {
			t.Errorf("%s: %v", host, err)
		}
		if leaf.Leaf.VerifyHostname("b.test") == nil {
			t.Error("the leaf is for others, too")
		}
		if life := time.Until(leaf.Leaf.NotAfter); life > leafLife || life < leafLife-time.Minute {
			t.Errorf("the leaf lives for %v", life)
		}
		if leaf.Leaf.IsCA || leaf.Leaf.KeyUsage&x509.KeyUsageCertSign != 0 {
			t.Error("the leaf can sign")
		}
	}
	if _, err := a.Leaf(""); err == nil {
		t.Error("a leaf for nobody")
	}
}

func TestLeafIsCached(t *testing.T) {
	_, a := generated(t)
	_, b := generated(t)
	one, _ := a.Leaf("a.test")
	if again, _ := a.Leaf("a.test"); again != one {
		t.Error("the same host got another leaf")
	}
	if other, _ := b.Leaf("a.test"); one.PrivateKey != other.PrivateKey {
		t.Error("leaves have different keys")
	}
	a.now = func() time.Time { return time.Now().Add(leafLife - leafLeast + time.Minute) }
	renewed, err := a.Leaf("a.test")
	if err != nil || renewed == one {
		t.Error("a leaf with little life was given out", err)
	}
	for n := range maxLeaves + 10 {
		if _, err := a.Leaf(fmt.Sprintf("n%d.test", n)); err != nil {
			t.Fatal(err)
		}
	}
	if len(a.leaves) > maxLeaves {
		t.Errorf("%d leaves are kept", len(a.leaves))
	}
	a.now = func() time.Time { return time.Now().Add(authorityLife + time.Hour) }
	if _, err := a.Leaf("late.test"); err == nil {
		t.Error("an authority that has expired signs")
	}
}

func TestAuthorityCertificate(t *testing.T) {
	pair, a := generated(t)
	c := a.cert
	if !c.IsCA || c.MaxPathLen != 0 || !c.MaxPathLenZero || c.Subject.CommonName != "Cloche prj_a" || c.SignatureAlgorithm != x509.ECDSAWithSHA256 {
		t.Errorf("%+v", c)
	}
	if _, err := tls.X509KeyPair(pair.Cert, pair.Key); err != nil {
		t.Error(err)
	}
	if _, err := Generate(""); err == nil {
		t.Error("an authority without a name")
	}
}

func TestNewRefuses(t *testing.T) {
	pair, a := generated(t)
	other, _ := generated(t)
	leaf, _ := a.Leaf("a.test")
	for name, bad := range map[string]sandbox.Authority{
		"nothing":     {},
		"no key":      {Cert: pair.Cert},
		"other's key": {Cert: pair.Cert, Key: other.Key},
		"swapped":     {Cert: pair.Key, Key: pair.Cert},
		"nonsense":    {Cert: []byte("x"), Key: []byte("y")},
		"cert as key": {Cert: pair.Cert, Key: pair.Cert},
		"a leaf":      {Cert: pemOf(leaf.Certificate[0]), Key: pair.Key},
	} {
		if _, err := New(bad); !sandbox.IsClass(err, sandbox.Invalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func pemOf(der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}
