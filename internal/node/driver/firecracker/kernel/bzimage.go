package kernel

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"fmt"
	"io"
	"regexp"

	"github.com/pierrec/lz4/v4"
)

const elfMagic = "\x7fELF"

// Offsets in the header of a bzImage; see the kernel's
// Documentation/arch/x86/boot.rst.
const (
	offSetupSects    = 0x1f1
	offHeaderMagic   = 0x202
	offVersion       = 0x206
	offPayload       = 0x248
	offPayloadLength = 0x24c
	headerEnd        = 0x250
	sector           = 512
)

// banner is how every Linux image says its release, in its read-only data.
var banner = regexp.MustCompile(`Linux version ([0-9]+\.[0-9]+[A-Za-z0-9._+~-]{0,60}) \(`)

// extract returns the ELF image for x86-64 that a kernel's image is or holds,
// an ELF image as it is, the payload of a bzImage uncompressed, and the release
// that it says it is of.
func extract(image []byte) (elf []byte, release string, err error) {
	if !bytes.HasPrefix(image, []byte(elfMagic)) {
		p, err := payload(image)
		if err != nil {
			return nil, "", err
		}
		if image, err = unpackPayload(p); err != nil {
			return nil, "", err
		}
	}
	if err := checkELF(image); err != nil {
		return nil, "", err
	}
	m := banner.FindSubmatch(image)
	if m == nil {
		return nil, "", invalid("the ELF file is no Linux kernel: it does not say of what version it is")
	}
	return image, string(m[1]), nil
}

// payload finds the compressed image in a bzImage.
func payload(b []byte) ([]byte, error) {
	switch {
	case len(b) >= 60 && string(b[56:60]) == "ARM\x64":
		return nil, unsupported("arm64")
	case len(b) < headerEnd || string(b[offHeaderMagic:offHeaderMagic+4]) != "HdrS":
		return nil, invalid("this is no kernel: neither a package of one, nor an ELF image, nor a bzImage")
	case binary.LittleEndian.Uint16(b[offVersion:]) < 0x208:
		return nil, invalid("the bzImage is older than boot protocol 2.08 (Linux 2.6.24)")
	}
	sects := int64(b[offSetupSects])
	if sects == 0 {
		sects = 4 // as the protocol says
	}
	start := (sects+1)*sector + int64(binary.LittleEndian.Uint32(b[offPayload:]))
	end := start + int64(binary.LittleEndian.Uint32(b[offPayloadLength:]))
	if end-start < 16 || end > int64(len(b)) {
		return nil, invalid("the bzImage's payload lies outside of it: it is cut off or damaged")
	}
	return b[start:end], nil
}

// unpackPayload uncompresses a bzImage's payload, whose last four bytes are the
// size of what comes out. Those of gzip are part of its format, all others are
// appended by the kernel's build.
func unpackPayload(p []byte) ([]byte, error) {
	size := int64(binary.LittleEndian.Uint32(p[len(p)-4:]))
	if size > maxImage {
		return nil, invalid("the kernel's image says that it has %d bytes, more than %d", size, maxImage)
	}
	body := p[:len(p)-4]
	has := func(magic string) bool { return bytes.HasPrefix(p, []byte(magic)) }
	var r io.Reader
	var err error
	done := func() {}
	switch {
	case has("\x02\x21\x4c\x18"): // the legacy frame; the reader knows it by this
		r = lz4.NewReader(bytes.NewReader(body))
	case has("\x1f\x8b"):
		r, done, err = decompress(".gz", bytes.NewReader(p))
	case has("\x28\xb5\x2f\xfd"):
		r, done, err = decompress(".zst", bytes.NewReader(body))
	case has(xzMagic):
		var out []byte
		if out, err = unpackXZ(body, size); err == nil {
			r = bytes.NewReader(out)
		}
	default:
		return nil, invalid("the kernel's image is compressed in a way that is not known (it begins with %x); lz4, xz, gzip and zstd are", p[:6])
	}
	if err != nil {
		return nil, invalid("the kernel's image is damaged: %w", err)
	}
	defer done()
	out, err := readExactly(r, size)
	if err != nil {
		return nil, invalid("the kernel's image is damaged: %w", err)
	}
	return out, nil
}

// readExactly reads all of r, which must be size bytes. It takes memory only
// for what really comes.
func readExactly(r io.Reader, size int64) ([]byte, error) {
	var b bytes.Buffer
	n, err := io.Copy(&b, io.LimitReader(r, size+1))
	if err == nil && n != size {
		err = fmt.Errorf("it is not of the %d bytes that it says", size)
	}
	return b.Bytes(), err
}

// checkELF checks that an image can be booted here: ELF, for x86-64, with
// something to load that lies within it.
func checkELF(image []byte) error {
	f, err := elf.NewFile(bytes.NewReader(image))
	if err != nil {
		return invalid("the kernel's image is no sound ELF file: %w", err)
	}
	if f.Class != elf.ELFCLASS64 || f.Data != elf.ELFDATA2LSB || f.Machine != elf.EM_X86_64 {
		return unsupported(f.Machine.String())
	}
	if f.Type != elf.ET_EXEC && f.Type != elf.ET_DYN {
		return invalid("the ELF file is no kernel but of type %s", f.Type)
	}
	loads := 0
	for _, p := range f.Progs {
		if p.Type != elf.PT_LOAD {
			continue
		}
		if p.Off > uint64(len(image)) || p.Filesz > uint64(len(image))-p.Off {
			return invalid("the kernel's image is cut off")
		}
		loads++
	}
	if loads == 0 {
		return invalid("the ELF file has nothing to load")
	}
	return nil
}

func unsupported(machine string) error {
	e := *invalid("the kernel is for %s; guests are x86-64 so far", machine)
	e.Code = "kernel_architecture"
	return &e
}
