package agent

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"cloche.dev/cloche/internal/guestapi/guestv1"
	"cloche.dev/cloche/internal/sandbox"
)

// What a guest is told of the way out: who answers names, and which authority
// stands for the names that the gateway terminates TLS of. The paths never change, so that
// a snapshot's processes find what is new at the old place.
const (
	resolvFile = "/etc/resolv.conf"
	trustDir   = runDir + "/ca"
	caFile     = trustDir + "/ca.pem"     // the authority
	bundleFile = trustDir + "/bundle.pem" // the authority, the host's roots and the system's own
	storeFile  = trustDir + "/trust.p12"  // for Java

	maxNameservers = 3 // what resolvers read
	maxBundle      = 8 << 20
	maxProblem     = 512

	bundleBegin = "# BEGIN cloche: written at each start, changes are lost\n"
	bundleEnd   = "# END cloche\n"
)

// systemBundles are where systems keep their roots in one file. Links to one
// of them are found here too, and left alone.
var systemBundles = []string{
	"/etc/ssl/certs/ca-certificates.crt",
	"/etc/pki/tls/certs/ca-bundle.crt",
	"/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
	"/var/lib/ca-certificates/ca-bundle.pem",
	"/etc/ssl/cert.pem",
}

// trustEnv names the files to the programs that look nowhere else.
var trustEnv = map[string][]string{
	bundleFile: {"SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "PIP_CERT", "GIT_SSL_CAINFO", "CARGO_HTTP_CAINFO", "AWS_CA_BUNDLE"},
	caFile:     {"NODE_EXTRA_CA_CERTS"},
	storeFile:  {"JAVA_TOOL_OPTIONS"},
}

const javaOptions = "-Djavax.net.ssl.trustStore=" + storeFile + " -Djavax.net.ssl.trustStoreType=PKCS12 -Djavax.net.ssl.trustStorePassword=changeit"

// checkWayOut refuses what no file could say.
func checkWayOut(m *guestv1.SetupRequest) error {
	if len(m.GetNameservers()) > maxNameservers {
		return sandbox.Errorf(sandbox.Invalid, "bad_nameservers", "a resolver reads at most %d name servers", maxNameservers)
	}
	for _, s := range m.GetNameservers() {
		if _, err := netip.ParseAddr(s); err != nil {
			return sandbox.Errorf(sandbox.Invalid, "bad_nameservers", "%q is no address", s)
		}
	}
	return nil
}

// wayOut is one setting of the way out, and what went wrong.
type wayOut struct {
	problems []string
	written  map[string]bool // files of trustDir that are as they should be
}

// setWayOut writes what m says of the way out. It adds to m's environment the
// files that are there, unless the sandbox's own environment says otherwise.
// What can't be done, since the template or its user has something else there, is told and harms nothing else.
func (a *Agent) setWayOut(m *guestv1.SetupRequest) []string {
	w := &wayOut{written: map[string]bool{}}
	if list := m.GetNameservers(); len(list) > 0 {
		w.try(resolvFile, ensureFile(resolvFile, []byte("nameserver "+strings.Join(list, "\nnameserver ")+"\n")))
	}
	if len(m.GetCaPem())+len(m.GetTrustP12())+len(m.GetRootsPem()) > 0 {
		w.trust(m)
		env := m.GetEnv()
		if env == nil {
			env = map[string]string{}
		}
		for file, names := range trustEnv {
			for _, name := range names {
				if _, set := env[name]; set || !w.written[file] {
					continue
				}
				env[name] = file
				if file == storeFile {
					env[name] = javaOptions
				}
			}
		}
		m.Env = env
	}
	for _, p := range w.problems {
		a.cfg.Log.Warn("the way out is not as it should be", "problem", p)
	}
	return w.problems
}

// try notes a failure.
func (w *wayOut) try(file string, err error) bool {
	if err != nil {
		text := err.Error()
		if !strings.Contains(text, file) {
			text = file + ": " + text
		}
		w.problems = append(w.problems, strings.ToValidUTF8(text[:min(len(text), maxProblem)], "?"))
	}
	return err == nil
}

// trust writes the three files, and the authority into the system's bundles.
func (w *wayOut) trust(m *guestv1.SetupRequest) {
	ca := lines(m.GetCaPem())
	own := w.bundles(ca)
	if !w.try(trustDir, errors.Join(realDir(runDir), realDir(trustDir))) {
		return
	}
	for file, content := range map[string][]byte{
		caFile: ca, bundleFile: append(union(lines(m.GetRootsPem()), own), ca...), storeFile: m.GetTrustP12(),
	} {
		if len(content) > 0 {
			w.written[file] = w.try(file, ensureFile(file, content))
		}
	}
}

// bundles puts ca into every bundle that the system has and returns what was
// in the first without it.
func (w *wayOut) bundles(ca []byte) (own []byte) {
	for _, file := range systemBundles {
		old, err := readRegular(file)
		switch {
		case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP) && linked(file):
			continue
		case !w.try(file, err):
			continue
		}
		plain := withoutBlock(old)
		if own == nil {
			own = plain
		}
		next := plain
		if len(ca) > 0 {
			next = slices.Concat(plain, []byte(bundleBegin), ca, []byte(bundleEnd))
		}
		if !bytes.Equal(next, lines(old)) {
			w.try(file, writeFile(file, next))
		}
	}
	return own
}

// linked tells whether a link leads to a bundle that is found under its own name.
func linked(file string) bool {
	to, err := filepath.EvalSymlinks(file)
	return err != nil || slices.Contains(systemBundles, to)
}

// withoutBlock is a bundle without what is ours, with a line's end at its end.
// A mark that has lost its other half is left: what follows it may be somebody's.
func withoutBlock(b []byte) []byte {
	b = lines(b)
	for from := 0; ; {
		end := bytes.Index(b[from:], []byte(bundleEnd))
		if end < 0 {
			return b
		}
		end += from
		begin := bytes.LastIndex(b[from:end], []byte(bundleBegin))
		if begin < 0 {
			from = end + len(bundleEnd)
			continue
		}
		b = slices.Concat(b[:from+begin], b[end+len(bundleEnd):])
		from += begin
	}
}

// lines is b with a line's end at its end, if it has anything.
func lines(b []byte) []byte {
	if len(b) == 0 || b[len(b)-1] == '\n' {
		return b
	}
	return append(slices.Clip(b), '\n')
}

// union is roots, and what own has of certificates that roots has not.
func union(roots, own []byte) []byte {
	if bytes.Equal(roots, own) {
		return slices.Clone(roots)
	}
	out, have := slices.Clone(roots), map[string]bool{}
	for c := range certificates(roots) {
		have[string(c)] = true
	}
	for c := range certificates(own) {
		if !have[string(c)] {
			have[string(c)] = true
			out = append(out, c...)
		}
	}
	return out
}

// certificates yields the PEM blocks of certificates in b, whole lines each.
func certificates(b []byte) func(func([]byte) bool) {
	const begin, end = "-----BEGIN CERTIFICATE-----\n", "-----END CERTIFICATE-----\n"
	return func(yield func([]byte) bool) {
		for {
			n := bytes.Index(b, []byte(begin))
			if n < 0 {
				return
			}
			b = b[n:]
			size := bytes.Index(b, []byte(end)) + len(end)
			if size < len(end) || !yield(b[:size]) {
				return
			}
			b = b[size:]
		}
	}
}

// realDir makes a directory where nothing is, and refuses anything else: what
// is written below it must not land elsewhere.
func realDir(dir string) error {
	if err := os.Mkdir(dir, 0o755); err == nil || !errors.Is(err, fs.ErrExist) {
		return err
	}
	if st, err := os.Lstat(dir); err != nil || !st.IsDir() {
		return fmt.Errorf("%s is no directory", dir)
	}
	return nil
}

// readRegular reads a regular file of bounded size. It follows no link and
// waits for nobody, whatever is there.
func readRegular(path string) ([]byte, error) {
	f, st, err := openRegular(path, os.O_RDONLY|unix.O_NOFOLLOW)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if st.Size() > maxBundle {
		return nil, fmt.Errorf("it has more than %d bytes", maxBundle)
	}
	return io.ReadAll(io.LimitReader(f, maxBundle))
}

// ensureFile makes content what stands at path, for everybody to read, unless
// it is so already.
func ensureFile(path string, content []byte) error {
	if old, err := readRegular(path); err == nil && bytes.Equal(old, content) {
		return nil
	}
	return writeFile(path, content)
}

// writeFile replaces what is at path, a link for one, itself. A file keeps its
// owner and its mode.
func writeFile(path string, content []byte) error {
	mode, uid, gid := os.FileMode(0o644), 0, 0
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err == nil && st.Mode&unix.S_IFMT == unix.S_IFREG {
		mode, uid, gid = os.FileMode(st.Mode&0o777), int(st.Uid), int(st.Gid)
	}
	return renameOwned(path, content, mode, uid, gid)
}
