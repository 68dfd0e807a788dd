package kernel

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"os/exec"
	"strings"
	"testing"

	"cloche.dev/cloche/internal/sandbox"
)

func TestExtract(t *testing.T) {
	want := vmlinux()
	for _, suffix := range []string{".lz4", ".xz", ".zst", ".gz"} {
		p := pack(t, suffix, want)
		if suffix != ".gz" { // which ends in its size by itself
			p = sized(p, len(want))
		}
		got, name, err := extract(bzImage(p))
		if err != nil || !bytes.Equal(got, want) || name != release {
			t.Errorf("%s: %d bytes, %q, %v", suffix, len(got), name, err)
		}
		bad := bytes.Clone(p)
		bad[len(bad)/2] ^= 0x55
		if got, _, err := extract(bzImage(bad)); err == nil && !bytes.Equal(got, want) && suffix != ".lz4" { // which has no checksum
			t.Errorf("%s: damage goes unseen", suffix)
		}
		if _, _, err := extract(bzImage(sized(p[:len(p)-4], len(want)-1))); suffix != ".gz" && !sandbox.IsClass(err, sandbox.Invalid) {
			t.Errorf("%s: a wrong size: %v", suffix, err)
		}
	}
	if got, _, err := extract(want); err != nil || !bytes.Equal(got, want) {
		t.Errorf("ELF as it is: %v", err)
	}
}

// The kernel's own build filters x86 code before xz.
func TestExtractFiltered(t *testing.T) {
	tool, err := exec.LookPath("xz")
	if err != nil {
		t.Skip("SKIP: xz is not installed, which makes what the kernel's build makes")
	}
	want := vmlinux()
	run := func(args ...string) []byte {
		cmd := exec.Command(tool, append([]string{"-c"}, args...)...)
		cmd.Stdin = bytes.NewReader(want)
		out, err := cmd.Output()
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	p := run("--check=crc32", "--x86", "--lzma2=dict=1MiB")
	if h, err := parseXZHead(p); err != nil || !h.x86 || h.dict != 1<<20 {
		t.Fatalf("%+v, %v", h, err)
	}
	got, _, err := extract(bzImage(sized(p, len(want))))
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	for i := 0; i < len(p); i += 1 + i/4 { // all of the header, and here and there in the data
		bad := bytes.Clone(p)
		bad[i] ^= 1
		if got, _, err := extract(bzImage(sized(bad, len(want)))); err == nil && !bytes.Equal(got, want) {
			t.Fatalf("damage of byte %d goes unseen", i)
		}
	}
	for _, args := range [][]string{{"--check=crc64", "--x86", "--lzma2"}, {"--check=crc32", "--arm", "--lzma2"}, {"--check=crc32", "--delta", "--x86", "--lzma2"}} {
		if _, _, err := extract(bzImage(sized(run(args...), len(want)))); !sandbox.IsClass(err, sandbox.Invalid) {
			t.Errorf("%v: %v", args, err)
		}
	}
	huge := run("--check=crc32", "--x86", "--lzma2=dict=1GiB")
	if _, _, err := extract(bzImage(sized(huge, len(want)))); err == nil || !strings.Contains(err.Error(), "dictionary") {
		t.Errorf("a dictionary of a GiB: %v", err)
	}
}

func TestExtractRefuses(t *testing.T) {
	good := bzImage(sized(pack(t, ".lz4", vmlinux()), len(vmlinux())))
	edit := func(do func(b []byte)) []byte {
		b := bytes.Clone(good)
		do(b)
		return b
	}
	put := func(at int, v uint32) []byte {
		return edit(func(b []byte) { binary.LittleEndian.PutUint32(b[at:], v) })
	}
	arm := make([]byte, 64)
	copy(arm[56:], "ARM\x64")
	for name, c := range map[string]struct {
		image []byte
		say   string
	}{
		"nothing":           {nil, "no kernel"},
		"text":              {bytes.Repeat([]byte("text "), 300), "no kernel"},
		"old protocol":      {put(offVersion, 0x207), "older"},
		"no payload":        {put(offPayloadLength, 0), "outside"},
		"payload too long":  {put(offPayloadLength, 0xffffffff), "outside"},
		"payload elsewhere": {put(offPayload, 0xffffffff), "outside"},
		"cut off":           {good[:len(good)-1000], "outside"},
		"says too much":     {bzImage(sized(pack(t, ".lz4", vmlinux()), 1<<30)), "more than"},
		"bzip2":             {bzImage(sized([]byte("BZh9 and much more of that"), 1000)), "not known"},
		"no ELF inside":     {bzImage(sized(pack(t, ".zst", make([]byte, 5000)), 5000)), "no sound ELF"},
		"arm64":             {arm, "arm64"},
		"ELF for arm64":     {elfImage(elf.EM_AARCH64, elf.ET_EXEC, "Linux version 6.1 ("), "EM_AARCH64"},
		"an object":         {elfImage(elf.EM_X86_64, elf.ET_REL, "Linux version 6.1 ("), "no kernel"},
		"a program":         {elfImage(elf.EM_X86_64, elf.ET_EXEC, "hello"), "no Linux kernel"},
		"ELF cut off":       {vmlinux()[:200], "cut off"},
		"ELF without loads": {func() []byte { b := vmlinux(); b[64] = 0; return b }(), "nothing to load"},
	} {
		_, _, err := extract(c.image)
		if !sandbox.IsClass(err, sandbox.Invalid) || !strings.Contains(err.Error(), c.say) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// FuzzExtract: what is taken for a kernel is one that was checked.
func FuzzExtract(f *testing.F) {
	small := elfImage(elf.EM_X86_64, elf.ET_EXEC, "Linux version 6.1.0 (gcc) "+strings.Repeat("\xe8\x00\x01\x02\xff", 40))
	f.Add(small)
	for _, suffix := range []string{".lz4", ".xz", ".zst", ".gz"} {
		p := pack(f, suffix, small)
		if suffix != ".gz" {
			p = sized(p, len(small))
		}
		f.Add(bzImage(p))
	}
	// A stream with the x86 filter in its header.
	f.Add(bzImage(sized([]byte(xzMagic+"\x00\x01\x69\x22\xde\x36\x03\x01\x04\x00\x21\x01\x16\x00\x00\x00\x00\x00\x00\x00\x01\x00\x00x"), 1)))
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) > offVersion+2 { // the fuzzer would seldom find a size that is small
			for i := len(b) - 3; i < len(b); i++ {
				b[i] &= 0x0f
			}
		}
		image, _, err := extract(b)
		if err != nil {
			if !sandbox.IsClass(err, sandbox.Invalid) {
				t.Fatal(err)
			}
			return
		}
		if checkELF(image) != nil || len(image) > maxImage {
			t.Fatal("an unchecked image")
		}
	})
}
