// Package ca is a project's own certificate authority: the gateway ends TLS
// connections of sandboxes with leaves that it signs. A leaf lives for a day
// and is only ever seen inside; one key, which never leaves the process, is
// behind all leaves. Control makes an authority with Generate and keeps it
// sealed; the proxy calls Leaf.
package ca

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"sync"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

const (
	authorityLife = 10 * 365 * 24 * time.Hour
	leafLife      = 24 * time.Hour
	leafLeast     = 6 * time.Hour // a cached leaf with less life is made anew
	backdate      = 24 * time.Hour
	maxLeaves     = 1024
	maxCommonName = 64 // RFC 5280, ub-common-name
	maxHost       = 253
)

// Generate makes an authority: an ECDSA P-256 key and a certificate that may
// sign leaves and no further authority.
func Generate(commonName string) (sandbox.Authority, error) {
	if commonName == "" || len(commonName) > maxCommonName {
		return sandbox.Authority{}, sandbox.Errorf(sandbox.Invalid, "bad_common_name", "an authority's name has 1 to %d bytes", maxCommonName)
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return sandbox.Authority{}, err
	}
	now := time.Now()
	template := &x509.Certificate{
		Subject:               pkix.Name{CommonName: commonName},
		NotBefore:             now.Add(-backdate), // a guest's clock may be behind
		NotAfter:              now.Add(authorityLife),
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
		BasicConstraintsValid: true,
		IsCA:                  true,
		MaxPathLenZero:        true,
	}
	if template.SerialNumber, err = serial(); err != nil {
		return sandbox.Authority{}, err
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		return sandbox.Authority{}, err
	}
	secret, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return sandbox.Authority{}, err
	}
	return sandbox.Authority{
		Cert: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		Key:  pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: secret}),
	}, nil
}

// Authority signs leaves. Any number of goroutines may use it.
type Authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey

	mu     sync.Mutex
	leaves map[string]*tls.Certificate
	now    func() time.Time
}

// New reads an authority from its PEM.
func New(a sandbox.Authority) (*Authority, error) {
	bad := func(what string) error {
		return sandbox.Errorf(sandbox.Invalid, "bad_authority", "the certificate authority %s", what)
	}
	block, _ := pem.Decode(a.Cert)
	if block == nil || block.Type != "CERTIFICATE" {
		return nil, bad("has no certificate")
	}
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil || !cert.IsCA || !cert.BasicConstraintsValid {
		return nil, bad("has a certificate that can't sign others")
	}
	block, _ = pem.Decode(a.Key)
	if block == nil || block.Type != "PRIVATE KEY" {
		return nil, bad("has no key")
	}
	parsed, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return nil, bad("has a key that can't be read")
	}
	key, ok := parsed.(*ecdsa.PrivateKey)
	if !ok || !key.PublicKey.Equal(cert.PublicKey) {
		return nil, bad("has a key that isn't its certificate's")
	}
	return &Authority{cert: cert, key: key, leaves: map[string]*tls.Certificate{}, now: time.Now}, nil
}

// leafKey is the one key of all leaves of this process. It is told to nobody,
// so a second one for each host would protect nothing.
var leafKey = sync.OnceValues(func() (*ecdsa.PrivateKey, error) {
	return ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
})

// Leaf returns a certificate for a host, which is a canonical name.
func (a *Authority) Leaf(host string) (*tls.Certificate, error) {
	if host == "" || len(host) > maxHost {
		return nil, sandbox.Errorf(sandbox.Invalid, "bad_host", "a certificate's host has 1 to %d bytes", maxHost)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	now := a.now()
	if leaf, ok := a.leaves[host]; ok {
		if now.Add(leafLeast).Before(leaf.Leaf.NotAfter) {
			return leaf, nil
		}
		delete(a.leaves, host)
	}
	leaf, err := a.sign(host, now)
	if err != nil {
		return nil, err
	}
	if len(a.leaves) >= maxLeaves {
		for other := range a.leaves { // any: a guest that asks for ever new names costs itself time
			delete(a.leaves, other)
			break
		}
	}
	a.leaves[host] = leaf
	return leaf, nil
}

func (a *Authority) sign(host string, now time.Time) (*tls.Certificate, error) {
	key, err := leafKey()
	if err != nil {
		return nil, err
	}
	number, err := serial()
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		SerialNumber:          number,
		NotBefore:             now.Add(-backdate),
		NotAfter:              now.Add(leafLife),
		KeyUsage:              x509.KeyUsageDigitalSignature,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		BasicConstraintsValid: true,
		DNSNames:              []string{host},
	}
	if len(host) <= maxCommonName {
		template.Subject.CommonName = host
	}
	if template.NotAfter.After(a.cert.NotAfter) {
		template.NotAfter = a.cert.NotAfter
	}
	if !template.NotAfter.After(now) {
		return nil, sandbox.Errorf(sandbox.FailedPrecondition, "authority_expired", "the project's certificate authority has expired")
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, &key.PublicKey, a.key)
	if err != nil {
		return nil, err
	}
	parsed, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: parsed}, nil
}

// serial returns a random serial number of 127 bits.
func serial() (*big.Int, error) {
	return rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
}
