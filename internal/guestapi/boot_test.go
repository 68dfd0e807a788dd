package guestapi

import (
	"encoding/base64"
	"errors"
	"io"
	"reflect"
	"strings"
	"testing"
	"testing/iotest"

	"cloche.dev/cloche/internal/sandbox"
)

func exampleBoot() Boot {
	return Boot{
		Dial: "vsock:2:1024", Report: 1023, Hostname: "box-1", MaxProcs: 128,
		Env: map[string]string{"GREETING": "hello = you"}, Root: RootDisk, Memory: 512 << 20,
	}
}

func TestBootRoundTrip(t *testing.T) {
	want := exampleBoot()
	arg, err := want.Arg()
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{arg, "quiet " + arg + "\n", "a=b\t" + arg + "== panic=-1"} {
		if got, err := ParseBoot(line); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("ParseBoot(%q) = %+v, %v", line, got, err)
		}
	}
}

func TestBootRefused(t *testing.T) {
	word := func(json string) string { return bootKey + base64.RawURLEncoding.EncodeToString([]byte(json)) }
	const fine = `{"dial":"vsock:2:1024","boot":1023,"hostname":"","max_procs":9,"env":null,"root":"none","memory":1048576}`
	if _, err := ParseBoot(word(fine)); err != nil {
		t.Fatalf("the plain one: %v", err)
	}
	for name, line := range map[string]string{
		"nothing":        "quiet panic=-1",
		"twice":          word(fine) + " " + word(fine),
		"no base64":      "cloche=%%%",
		"no json":        word("hello"),
		"two values":     word(fine + fine),
		"unknown field":  word(strings.Replace(fine, `"env"`, `"more":1,"env"`, 1)),
		"unix":           word(strings.Replace(fine, "vsock:2:1024", "unix:/x", 1)),
		"no port":        word(strings.Replace(fine, "1023", "0", 1)),
		"negative port":  word(strings.Replace(fine, "1023", "-1", 1)),
		"no processes":   word(strings.Replace(fine, ":9", ":0", 1)),
		"no memory":      word(strings.Replace(fine, "1048576", "0", 1)),
		"another root":   word(strings.Replace(fine, `"none"`, `"nfs"`, 1)),
		"host name":      word(strings.Replace(fine, `"hostname":""`, `"hostname":"a b"`, 1)),
		"variable":       word(strings.Replace(fine, "null", `{"A=B":"c"}`, 1)),
		"NUL in a value": word(strings.Replace(fine, "null", `{"A":"\u0000"}`, 1)),
		"endless":        word(fine) + strings.Repeat(" x", 4000),
	} {
		if b, err := ParseBoot(line); err == nil {
			t.Errorf("%s: accepted as %+v", name, b)
		}
	}
	long := exampleBoot()
	long.Env["LONG"] = strings.Repeat("x", 2000)
	if _, err := long.Arg(); err == nil {
		t.Error("a command line that is too long was made")
	}
}

func TestBootReport(t *testing.T) {
	if line := string(BootReport(nil)); line != "{\"ok\":true}\n" {
		t.Errorf("ok is %q", line)
	}
	if err := ReadBootReport(iotest.OneByteReader(strings.NewReader("{\"ok\":true}\nmore"))); err != nil {
		t.Errorf("ok reads as %v", err)
	}
	for name, failure := range map[string]error{
		"short": errors.New("no disk"), "empty": errors.New(""),
		"long": errors.New(strings.Repeat("<\x00\xff", 5000)),
	} {
		line := BootReport(failure)
		if len(line) > MaxBootReport || !strings.HasSuffix(string(line), "\n") {
			t.Errorf("%s: a report of %d bytes", name, len(line))
		}
		if err := ReadBootReport(strings.NewReader(string(line))); !sandbox.IsClass(err, sandbox.FailedPrecondition) {
			t.Errorf("%s: reads as %v", name, err)
		}
	}
	for name, said := range map[string]string{
		"nothing": "", "half": `{"ok":true`, "no json": "hello\n", "neither": "{}\n",
		"both": `{"ok":true,"error":"yet"}` + "\n", "endless": strings.Repeat("x", 1<<20),
	} {
		if err := ReadBootReport(strings.NewReader(said)); !sandbox.IsClass(err, sandbox.FailedPrecondition) {
			t.Errorf("%s: reads as %v", name, err)
		}
	}
}

func FuzzParseBoot(f *testing.F) {
	arg, err := exampleBoot().Arg()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(arg)
	f.Add("quiet " + arg + " panic=-1")
	f.Add(`cloche=eyJkaWFsIjoidnNvY2s6MjoxIn0`)
	f.Fuzz(func(t *testing.T, line string) {
		b, err := ParseBoot(line)
		if err != nil {
			return
		}
		arg, err := b.Arg()
		if err != nil {
			t.Fatalf("what was read can't be said: %v", err)
		}
		again, err := ParseBoot(arg)
		if err != nil || again.Dial != b.Dial || again.Memory != b.Memory || len(again.Env) != len(b.Env) {
			t.Fatalf("%+v came back as %+v, %v", b, again, err)
		}
	})
}

func FuzzReadBootReport(f *testing.F) {
	f.Add([]byte("{\"ok\":true}\n"))
	f.Add(BootReport(errors.New("no disk")))
	f.Fuzz(func(t *testing.T, said []byte) {
		err := ReadBootReport(io.LimitReader(iotest.HalfReader(strings.NewReader(string(said))), 1<<20))
		if err != nil && (!sandbox.IsClass(err, sandbox.FailedPrecondition) || len(err.Error()) > MaxBootReport) {
			t.Fatalf("%v", err)
		}
	})
}
