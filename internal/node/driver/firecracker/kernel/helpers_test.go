package kernel

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"debug/elf"
	"encoding/binary"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"
	"github.com/pierrec/lz4/v4"
	"github.com/ulikunitz/xz"
)

const release = "6.1.0-9-test"

// elfImage makes an ELF file with one segment to load that holds data.
func elfImage(machine elf.Machine, kind elf.Type, data string) []byte {
	var b bytes.Buffer
	h := elf.Header64{
		Ident: [16]byte{0x7f, 'E', 'L', 'F', byte(elf.ELFCLASS64), byte(elf.ELFDATA2LSB), 1},
		Type:  uint16(kind), Machine: uint16(machine), Version: 1, Phoff: 64, Ehsize: 64, Phentsize: 56, Phnum: 1, Shentsize: 64,
	}
	p := elf.Prog64{Type: uint32(elf.PT_LOAD), Off: 120, Filesz: uint64(len(data)), Memsz: uint64(len(data))}
	for _, v := range []any{h, p} {
		_ = binary.Write(&b, binary.LittleEndian, v)
	}
	b.WriteString(data)
	return b.Bytes()
}

// vmlinux is a kernel's image that says its release, with code-like bytes that
// the x86 branch filter changes.
func vmlinux() []byte {
	rnd := rand.New(rand.NewPCG(1, 2))
	code := make([]byte, 100_000)
	for i := range code {
		code[i] = []byte{0xe8, 0xe9, 0, 0xff, 0x90, byte(rnd.Uint32())}[rnd.IntN(6)]
	}
	return elfImage(elf.EM_X86_64, elf.ET_EXEC, "Linux version "+release+" (gcc) #1\x00"+string(code))
}

// ko makes a module that says the given lines about itself.
func ko(lines ...string) []byte {
	info := strings.Join(lines, "\x00") + "\x00"
	names := "\x00.modinfo\x00.shstrtab\x00"
	h := elf.Header64{
		Ident: [16]byte{0x7f, 'E', 'L', 'F', byte(elf.ELFCLASS64), byte(elf.ELFDATA2LSB), 1},
		Type:  uint16(elf.ET_REL), Machine: uint16(elf.EM_X86_64), Version: 1, Shoff: 64, Ehsize: 64, Shentsize: 64, Shnum: 3, Shstrndx: 2,
	}
	at := uint64(64 + 3*64)
	sections := []elf.Section64{
		{},
		{Name: 1, Type: uint32(elf.SHT_PROGBITS), Off: at, Size: uint64(len(info))},
		{Name: 10, Type: uint32(elf.SHT_STRTAB), Off: at + uint64(len(info)), Size: uint64(len(names))},
	}
	var b bytes.Buffer
	for _, v := range []any{h, sections} {
		_ = binary.Write(&b, binary.LittleEndian, v)
	}
	b.WriteString(info + names)
	return b.Bytes()
}

// pack compresses as a suffix says; ".lz4" is the legacy frame.
func pack(t testing.TB, suffix string, b []byte) []byte {
	t.Helper()
	var out bytes.Buffer
	var w io.WriteCloser
	var err error
	switch suffix {
	case "":
		return b
	case ".xz":
		w, err = xz.WriterConfig{CheckSum: xz.CRC32}.NewWriter(&out)
	case ".gz":
		w = gzip.NewWriter(&out)
	case ".zst":
		w, err = zstd.NewWriter(&out)
	case ".lz4":
		z := lz4.NewWriter(&out)
		w, err = z, z.Apply(lz4.LegacyOption(true))
	}
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(b); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// bzImage makes one around a payload, which ends in its own size.
func bzImage(payload []byte) []byte {
	const sects = 3
	b := make([]byte, (sects+1)*sector)
	b[offSetupSects] = sects
	copy(b[offHeaderMagic:], "HdrS")
	binary.LittleEndian.PutUint16(b[offVersion:], 0x20f)
	binary.LittleEndian.PutUint32(b[offPayload:], 8)
	binary.LittleEndian.PutUint32(b[offPayloadLength:], uint32(len(payload)))
	return append(append(append(b, "setup   "...), payload...), "what follows"...)
}

// sized appends a size, as the kernel's build does.
func sized(b []byte, size int) []byte {
	return binary.LittleEndian.AppendUint32(bytes.Clone(b), uint32(size))
}

type entry struct {
	name, link string
	data       []byte
	kind       byte
}

// kernelTree is a kernel's package: modules in all compressions, one with - in
// its file's name, one that needs an algorithm by an alias, one built in.
func kernelTree(t testing.TB) []entry {
	dir := "lib/modules/" + release + "/"
	mod := func(name, suffix string, lines ...string) entry {
		return entry{name: dir + "kernel/" + name + ".ko" + suffix, data: pack(t, suffix, ko(append(lines, "license=GPL")...))}
	}
	return []entry{
		{name: "boot/vmlinuz-" + release, data: bzImage(sized(pack(t, ".lz4", vmlinux()), len(vmlinux())))},
		{name: "boot/config-" + release, data: []byte("CONFIG_X=y\n")},
		{name: dir + "modules.builtin", data: []byte("kernel/fs/ext4/ext4.ko\nkernel/lib/rng-core.ko\n")},
		{name: dir + "modules.builtin.modinfo", data: []byte("ext4.alias=fs-ext4\x00ext4.license=GPL\x00")},
		mod("drivers/virtio/virtio", ".gz", "depends="),
		mod("drivers/virtio/virtio_ring", "", "depends=virtio"),
		mod("drivers/virtio/virtio_mmio", ".xz", "depends=virtio,virtio_ring"),
		mod("drivers/block/virtio_blk", ".zst", "depends=virtio_ring"),
		mod("drivers/char/virtio-rng", "", "depends=rng-core,virtio"),
		mod("drivers/net/virtio_net", "", "depends=net_failover,virtio"),
		mod("drivers/net/net_failover", "", "depends="),
		mod("net/vsock", "", "depends="),
		mod("net/vmw_vsock_virtio_transport", "", "depends=vsock,virtio"),
		mod("fs/erofs", "", "depends=libcrc32c", "softdep=pre: nowhere post: overlay"),
		mod("fs/overlay", "", "depends="),
		mod("lib/libcrc32c", "", "depends=", "softdep=pre: crypto-crc32c"),
		mod("arch/x86/crypto/crc32c-intel", "", "depends=", "alias=crypto-crc32c"),
		mod("crypto/crc32c_generic", "", "depends=", "alias=crypto-crc32c"),
		mod("drivers/net/unneeded", "", "depends=missing"),
	}
}

// loads is the order of kernelTree's modules.
var loads = "virtio virtio_ring virtio_mmio virtio_blk vsock vmw_vsock_virtio_transport virtio_rng net_failover virtio_net crc32c_generic libcrc32c erofs overlay"

func without(all []entry, part string) (out []entry) {
	for _, e := range all {
		if !strings.Contains(e.name, part) {
			out = append(out, e)
		}
	}
	return out
}

func writeTree(t testing.TB, all []entry) string {
	t.Helper()
	dir := t.TempDir()
	for _, e := range all {
		p := filepath.Join(dir, e.name)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, e.data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func ar(members ...entry) []byte {
	b := []byte("!<arch>\n")
	for _, m := range members {
		b = fmt.Appendf(b, "%-16s%-12d%-6d%-6d%-8s%-10d`\n", m.name, 0, 0, 0, "100644", len(m.data))
		b = append(b, m.data...)
		if len(m.data)%2 == 1 {
			b = append(b, '\n')
		}
	}
	return b
}

func tarOf(t testing.TB, all []entry) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range all {
		h := &tar.Header{Name: e.name, Linkname: e.link, Typeflag: e.kind, Mode: 0o644, Size: int64(len(e.data))}
		if h.Typeflag == 0 {
			h.Typeflag, h.Name = tar.TypeReg, "./"+e.name
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(e.data); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// deb writes a Debian package with the entries and returns its file.
func deb(t testing.TB, suffix string, all []entry) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "kernel.deb")
	b := ar(
		entry{name: "debian-binary", data: []byte("2.0\n")},
		entry{name: "control.tar" + suffix, data: pack(t, suffix, tarOf(t, nil))},
		entry{name: "data.tar" + suffix, data: pack(t, suffix, tarOf(t, all))},
	)
	if err := os.WriteFile(file, b, 0o644); err != nil {
		t.Fatal(err)
	}
	return file
}
