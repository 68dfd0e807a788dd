// Package trust makes what a sandbox's programs are told to trust: the host's
// own roots, and a store of them and a project's authority in the form that
// Java reads. What holds: the same certificates always make the same bytes, so that a
// store can be compared with the one that is there.
//
// internal/node calls it, for each machine's setup; the guest's agent puts the
// result into place.
package trust

import (
	"bytes"
	"crypto/sha256"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"

	"software.sslmate.com/src/go-pkcs12"

	"cloche.dev/cloche/internal/sandbox"
)

// Password is the store's. It protects nothing: it is the one that Java's
// programs try where none is named.
const Password = "changeit"

const maxBundle = 8 << 20

// bundles are where systems keep their roots in one file.
var bundles = []string{
	"/etc/ssl/certs/ca-certificates.crt",                // Debian, Alpine, Arch
	"/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem", // Fedora and its kin
	"/etc/pki/tls/certs/ca-bundle.crt",
	"/etc/ssl/ca-bundle.pem", // openSUSE
	"/etc/ssl/cert.pem",
}

// Store makes a PKCS #12 store of the certificates in certs, which are PEM,
// each once. What is no certificate is left out.
func Store(certs ...[]byte) (p12 []byte, err error) {
	var entries []pkcs12.TrustStoreEntry
	seen := map[[sha256.Size]byte]bool{}
	hash := sha256.New()
	for _, text := range certs {
		for _, c := range parse(text) {
			sum := sha256.Sum256(c.Raw)
			if seen[sum] {
				continue
			}
			seen[sum] = true
			hash.Write(sum[:])
			// Java knows an entry by its name, which must be unlike all others.
			entries = append(entries, pkcs12.TrustStoreEntry{Cert: c, FriendlyName: fmt.Sprintf("cloche-%x", sum[:8])})
		}
	}
	if len(entries) == 0 {
		return nil, sandbox.Errorf(sandbox.Invalid, "no_certificates", "a trust store needs a certificate")
	}
	// Salts taken from what the store holds make the same store each time. They
	// hide nothing, since there is nothing to hide. AES and SHA-256 are what every
	// Java since 8u301 and 11.0.12 reads.
	salts := rand.NewChaCha8([32]byte(hash.Sum(nil)))
	return pkcs12.Modern2023.WithRand(salts).EncodeTrustStoreEntries(entries, Password)
}

// HostRoots reads the certificates of a file, or of the host's own bundle where
// file is "", and returns them as PEM and nothing else.
func HostRoots(file string) ([]byte, error) {
	files := bundles
	if file != "" {
		files = []string{file}
	}
	for _, name := range files {
		text, err := read(name)
		if file == "" && errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, sandbox.Errorf(sandbox.FailedPrecondition, "no_roots", "the trusted roots can't be read: %w", err)
		}
		var out bytes.Buffer
		for _, c := range parse(text) {
			if err := pem.Encode(&out, &pem.Block{Type: "CERTIFICATE", Bytes: c.Raw}); err != nil {
				return nil, err
			}
		}
		if out.Len() > 0 {
			return out.Bytes(), nil
		}
		if file != "" {
			return nil, sandbox.Errorf(sandbox.FailedPrecondition, "no_roots", "%s holds no certificate", file)
		}
	}
	return nil, sandbox.Errorf(sandbox.FailedPrecondition, "no_roots", "this host has no bundle of trusted roots").
		WithHint("install ca-certificates, or name a file")
}

func read(name string) ([]byte, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxBundle+1))
	if err == nil && len(text) > maxBundle {
		err = fmt.Errorf("%s is larger than %d bytes", name, maxBundle)
	}
	return text, err
}

// parse returns the certificates in text, in order.
func parse(text []byte) []*x509.Certificate {
	var out []*x509.Certificate
	for {
		var block *pem.Block
		if block, text = pem.Decode(text); block == nil {
			return out
		}
		if block.Type != "CERTIFICATE" {
			continue
		}
		if c, err := x509.ParseCertificate(block.Bytes); err == nil {
			out = append(out, c)
		}
	}
}
