package agent_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"cloche.dev/cloche/internal/guestapi"
	"cloche.dev/cloche/internal/guestapi/guestv1"
	"cloche.dev/cloche/internal/node/guestlink"
)

func pemOf(name string) string {
	return "-----BEGIN CERTIFICATE-----\n" + name + "\n-----END CERTIFICATE-----\n"
}

const (
	block  = "# BEGIN cloche: written at each start, changes are lost\n"
	ending = "# END cloche\n"
	debian = "/etc/ssl/certs/ca-certificates.crt"
	fedora = "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem"
	alpine = "/etc/ssl/cert.pem"
	redhat = "/etc/pki/tls/certs/ca-bundle.crt"
)

// setUp is what a node says to a machine of one epoch. It returns the problems.
func (g *guest) setUp(epoch uint64, former []byte, m *guestv1.SetupRequest) (key []byte, problems string) {
	g.t.Helper()
	key = guestapi.NewKey()
	r := g.connect(guestlink.Config{Key: key, Former: former, Epoch: epoch, Setup: m})
	return key, strings.Join(r.GetProblems(), "\n")
}

// inside is a file of a private guest, as it is.
func (g *guest) inside(name string) string {
	b, err := os.ReadFile(filepath.Join(g.root, name))
	if err != nil {
		return err.Error()
	}
	return string(b)
}

// TestWayOut: name servers and trust are put where programs find them, are
// replaced and not doubled when they change, and are left alone when nothing is said.
func TestWayOut(t *testing.T) {
	g := newPrivateGuest(t, map[string]string{debian: pemOf("root") + pemOf("house"), fedora: "old\n" + pemOf("root"), "/etc/resolv.conf": "nameserver 9.9.9.9\n"})
	if err := os.MkdirAll(filepath.Join(g.root, filepath.Dir(redhat)), 0o755); err != nil {
		t.Fatal(err)
	}
	if os.Symlink(fedora, filepath.Join(g.root, redhat)) != nil || os.Symlink("certs/ca-certificates.crt", filepath.Join(g.root, alpine)) != nil ||
		os.Chown(filepath.Join(g.root, debian), 7, 8) != nil || os.Chmod(filepath.Join(g.root, debian), 0o640) != nil {
		t.Fatal("can't prepare")
	}
	key, problems := g.setUp(1, nil, &guestv1.SetupRequest{Generation: 1})
	if r := g.run("ls /run/cloche; env | grep -c CA_BUNDLE"); problems != "" || r.out.String() != "generation\n0\n" || g.inside("/etc/resolv.conf") != "nameserver 9.9.9.9\n" || g.inside(debian) != pemOf("root")+pemOf("house") {
		t.Fatalf("with nothing said: %q %q", problems, &r.out)
	}

	setup := &guestv1.SetupRequest{
		Generation: 2, Nameservers: []string{"169.254.77.1", "169.254.77.2"}, CaPem: []byte(pemOf("ca one")), RootsPem: []byte(pemOf("root") + pemOf("public")),
		TrustP12: []byte("store one\x00"), Env: map[string]string{"PIP_CERT": "/mine", "JAVA_TOOL_OPTIONS": "-Xmx1g"},
	}
	key, problems = g.setUp(2, key, setup)
	check := func(ca string) {
		t.Helper()
		if got := g.inside("/etc/resolv.conf"); got != "nameserver 169.254.77.1\nnameserver 169.254.77.2\n" {
			t.Errorf("resolv.conf: %q", got)
		}
		if got := g.inside(debian); got != pemOf("root")+pemOf("house")+block+pemOf(ca)+ending {
			t.Errorf("bundle: %q", got)
		}
		if got := g.inside(fedora); got != "old\n"+pemOf("root")+block+pemOf(ca)+ending {
			t.Errorf("bundle: %q", got)
		}
		if r := g.run("cd /run/cloche/ca; ls; cat bundle.pem ca.pem"); r.out.String() != "bundle.pem\nca.pem\ntrust.p12\n"+pemOf("root")+pemOf("public")+pemOf("house")+pemOf(ca)+pemOf(ca) {
			t.Errorf("%q", &r.out)
		}
	}
	check("ca one")
	if problems != "" {
		t.Error(problems)
	}
	vars := "echo $SSL_CERT_FILE $REQUESTS_CA_BUNDLE $CURL_CA_BUNDLE $NODE_EXTRA_CA_CERTS $PIP_CERT $GIT_SSL_CAINFO $CARGO_HTTP_CAINFO $AWS_CA_BUNDLE $JAVA_TOOL_OPTIONS; stat -c '%u %g %a' " + debian + "; stat -c %a /run/cloche/ca/ca.pem"
	b := "/run/cloche/ca/bundle.pem"
	want := strings.Join([]string{b, b, b, "/run/cloche/ca/ca.pem", "/mine", b, b, b, "-Xmx1g"}, " ") + "\n7 8 640\n644\n"
	if r := g.run(vars); r.out.String() != want {
		t.Errorf("%q", &r.out)
	}

	// Another authority, and no environment of the sandbox's own: Java's too.
	setup.CaPem, setup.Generation, setup.Env = []byte(strings.TrimSuffix(pemOf("ca two"), "\n")), 3, nil
	key, _ = g.setUp(3, key, setup)
	check("ca two")
	show := "echo $PIP_CERT $JAVA_TOOL_OPTIONS"
	java := b + " -Djavax.net.ssl.trustStore=/run/cloche/ca/trust.p12 -Djavax.net.ssl.trustStoreType=PKCS12 -Djavax.net.ssl.trustStorePassword=changeit\n"
	if r := g.run(show); r.out.String() != java {
		t.Errorf("%q", &r.out)
	}
	// The same again writes nothing, and an agent that starts anew has it all.
	before := g.run("stat -c '%i %z' /run/cloche/ca/* /etc/resolv.conf " + debian).out.String()
	g.killAgent()
	eventually(t, func() bool { n, _ := g.link.Generation(); return n > 1 && g.link.Live() })
	if after := g.run("stat -c '%i %z' /run/cloche/ca/* /etc/resolv.conf " + debian).out.String(); after != before {
		t.Errorf("%q became %q", before, after)
	}
	if r := g.run(show); r.out.String() != java {
		t.Errorf("%q", &r.out)
	}
	// Without an authority the block goes again.
	setup.CaPem, setup.Generation = nil, 4
	g.setUp(4, key, setup)
	if got := g.inside(debian); got != pemOf("root")+pemOf("house") {
		t.Errorf("%q", got)
	}
}

// TestWayOutTraps: whatever stands where a file should be, nothing waits,
// nothing is written elsewhere, and what could not be done is told.
func TestWayOutTraps(t *testing.T) {
	g := newPrivateGuest(t, map[string]string{
		"/etc/elsewhere": "theirs\n", alpine: pemOf("root") + block + "cut off\n", debian + ".d/x": "",
		redhat: block + "a" + ending + pemOf("root") + block + "b" + ending,
	})
	at := func(name string) string { return filepath.Join(g.root, name) }
	err := os.Symlink("/etc/elsewhere", at("/etc/resolv.conf"))
	if err == nil {
		err = os.Mkdir(at("/etc/ssl/certs"), 0o755)
	}
	if os.IsExist(err) {
		err = nil
	}
	if err == nil {
		err = unix.Mkfifo(at(debian), 0o644)
	}
	if err == nil {
		err = os.MkdirAll(at(filepath.Dir(fedora)), 0o755)
	}
	if err == nil {
		err = os.Symlink("/etc/elsewhere", at(fedora))
	}
	if err != nil {
		t.Fatal(err)
	}
	setup := &guestv1.SetupRequest{Generation: 1, Nameservers: []string{"169.254.77.1"}, CaPem: []byte(pemOf("ca"))}
	began := time.Now()
	key, problems := g.setUp(1, nil, setup)
	if d := time.Since(began); d > 30*time.Second {
		t.Errorf("it took %v", d)
	}
	if n := len(strings.Split(problems, "\n")); n != 2 || !strings.Contains(problems, debian) || !strings.Contains(problems, fedora) {
		t.Errorf("%q", problems)
	}
	if got := g.inside("/etc/elsewhere"); got != "theirs\n" {
		t.Errorf("%q", got)
	}
	if st, err := os.Lstat(at("/etc/resolv.conf")); err != nil || !st.Mode().IsRegular() || g.inside("/etc/resolv.conf") != "nameserver 169.254.77.1\n" {
		t.Error(st, err)
	}
	if got := g.inside(redhat); got != pemOf("root")+block+pemOf("ca")+ending {
		t.Errorf("%q", got)
	}
	if got := g.inside(alpine); got != pemOf("root")+block+"cut off\n"+block+pemOf("ca")+ending {
		t.Errorf("%q", got)
	}
	// Without roots of the host's the system's are there.
	if r := g.run("cat /run/cloche/ca/bundle.pem; echo $JAVA_TOOL_OPTIONS $SSL_CERT_FILE"); r.out.String() != pemOf("root")+pemOf("ca")+"/run/cloche/ca/bundle.pem\n" {
		t.Errorf("%q", &r.out)
	}

	// Directories that lead elsewhere, or are none.
	g.run("rm -r /run/cloche/ca; mkdir /etc/trap; ln -s /etc/trap /run/cloche/ca; rm /etc/resolv.conf; mkdir -p /etc/resolv.conf/x")
	setup.Generation = 2
	_, problems = g.setUp(2, key, setup)
	if n := len(strings.Split(problems, "\n")); n != 4 || !strings.Contains(problems, "/run/cloche/ca ") || !strings.Contains(problems, "/etc/resolv.conf") {
		t.Errorf("%q", problems)
	}
	if got := g.inside(alpine); got != pemOf("root")+block+"cut off\n"+block+pemOf("ca")+ending {
		t.Errorf("%q", got)
	}
	if r := g.run("ls /etc/trap; echo -$SSL_CERT_FILE-"); r.out.String() != "--\n" {
		t.Errorf("%q", &r.out)
	}
}

// TestWayOutMounted: a file that is mounted is written in place.
func TestWayOutMounted(t *testing.T) {
	g := newPrivateGuest(t, map[string]string{"/etc/resolv.conf": "nameserver 9.9.9.9\nsearch something.long.example\n", "/etc/mounted": "x\n"})
	key, _ := g.setUp(1, nil, &guestv1.SetupRequest{Generation: 1})
	if r := g.run("mount --bind /etc/resolv.conf /etc/resolv.conf"); r.exit.GetCode() != 0 {
		t.Fatalf("%s", &r.err)
	}
	_, problems := g.setUp(2, key, &guestv1.SetupRequest{Generation: 2, Nameservers: []string{"169.254.77.1"}})
	if r := g.run("cat /etc/resolv.conf"); problems != "" || r.out.String() != "nameserver 169.254.77.1\n" {
		t.Errorf("%q %q", problems, &r.out)
	}
	if left, _ := filepath.Glob(filepath.Join(g.root, "/etc/.cloche-*")); len(left) != 0 {
		t.Error(left)
	}
}

func TestBadNameservers(t *testing.T) {
	g := newPrivateGuest(t, nil)
	g.setUp(1, nil, &guestv1.SetupRequest{})
	for _, list := range [][]string{{"x"}, {"1.1.1.1\noptions x"}, {""}, {"1.1.1.1", "1.1.1.1", "1.1.1.1", "1.1.1.1"}} {
		if _, err := g.c.Setup(t.Context(), request(&guestv1.SetupRequest{Nameservers: list})); code(err) != "invalid_argument" {
			t.Errorf("%v: %v", list, err)
		}
	}
}
