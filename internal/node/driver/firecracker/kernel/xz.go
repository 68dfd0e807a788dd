package kernel

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"

	"github.com/ulikunitz/xz"
	"github.com/ulikunitz/xz/lzma"
)

// The kernel's build compresses x86 images with xz and the x86 branch filter
// (scripts/xz_wrap.sh), which the xz library does not have. Such a payload is
// always one stream of one block with a CRC32, so its container is read here
// and the library is given the LZMA2 data. The format: xz-file-format.txt 1.2.

const (
	xzMagic   = "\xfd7zXZ\x00"
	maxXZHead = 12 + 1024 // of the stream's and the first block's header
	checkCRC  = 1
	idX86     = 0x04
	idLZMA2   = 0x21
)

// xzHead is what the headers of an xz stream and of its first block say.
type xzHead struct {
	check byte
	x86   bool  // the x86 branch filter comes before LZMA2
	dict  int64 // bytes of LZMA2's dictionary
	size  int   // bytes of both headers
}

var errXZ = errors.New("no xz stream that is understood")

// parseXZHead reads both headers. Their own checksums are left to whoever reads
// on: what it returns is only believed with the data.
func parseXZHead(b []byte) (h xzHead, err error) {
	if len(b) < 13 || string(b[:6]) != xzMagic || b[6] != 0 {
		return h, errXZ
	}
	h.check = b[7]
	h.size = 12 + (int(b[12])+1)*4
	if b[12] == 0 || len(b) < h.size { // 0 begins the index: there is no block
		return h, errXZ
	}
	flags, r := b[13], bytes.NewReader(b[14:h.size-4])
	for _, present := range []byte{0x40, 0x80} { // compressed and uncompressed size
		if flags&present != 0 {
			if _, err := binary.ReadUvarint(r); err != nil {
				return h, errXZ
			}
		}
	}
	for left := int(flags & 3); left >= 0; left-- {
		id, props, err := readFilter(r)
		switch {
		case err != nil:
			return h, err
		case id == idX86 && left == 1 && len(props) == 0:
			h.x86 = true
		case id == idLZMA2 && left == 0 && len(props) == 1:
			if h.dict, err = lzma.DecodeDictCap(props[0]); err != nil {
				return h, errXZ
			}
		default:
			return h, fmt.Errorf("xz filter %#x: %w", id, errXZ)
		}
	}
	return h, nil
}

func readFilter(r *bytes.Reader) (id uint64, props []byte, err error) {
	id, err = binary.ReadUvarint(r)
	if err != nil {
		return 0, nil, errXZ
	}
	n, err := binary.ReadUvarint(r)
	if err != nil || n > uint64(r.Len()) {
		return 0, nil, errXZ
	}
	props = make([]byte, n)
	_, err = io.ReadFull(r, props)
	return id, props, err
}

// unpackXZ uncompresses an image of size bytes.
func unpackXZ(b []byte, size int64) ([]byte, error) {
	h, err := parseXZHead(b)
	if err != nil {
		return nil, err
	}
	if h.dict > maxWindow {
		return nil, fmt.Errorf("its xz dictionary has %d bytes", h.dict)
	}
	if !h.x86 {
		r, err := xz.NewReader(bytes.NewReader(b))
		if err != nil {
			return nil, err
		}
		return readExactly(r, size)
	}
	if h.check != checkCRC {
		return nil, fmt.Errorf("xz check %d: %w", h.check, errXZ)
	}
	in := bytes.NewReader(b[h.size:])
	r, err := lzma.Reader2Config{DictCap: int(max(h.dict, lzma.MinDictCap))}.NewReader2(in)
	if err != nil {
		return nil, err
	}
	out, err := readExactly(r, size)
	if err != nil {
		return nil, err
	}
	decodeX86(out)
	// The check follows the data, which is padded to four bytes.
	at := len(b) - in.Len()
	at = h.size + (at-h.size+3)/4*4
	if at+4 > len(b) || binary.LittleEndian.Uint32(b[at:]) != crc32.ChecksumIEEE(out) {
		return nil, errors.New("its checksum is wrong")
	}
	return out, nil
}

// decodeX86 undoes the x86 branch filter in place: the operands of CALL and JMP,
// which the encoder made absolute, become relative again. Which bytes it took
// for operands depends on the three before, hence the mask. After
// lib/xz/xz_dec_bcj.c of the kernel, which is in the public domain.
func decodeX86(b []byte) {
	allowed := [8]bool{true, true, true, false, true, false, false, false}
	bit := [8]uint{0, 1, 2, 2, 3, 3, 3, 3}
	ends := func(c byte) bool { return c == 0 || c == 0xff }
	var mask uint
	prev := -1
	for i := 0; i+4 < len(b); i++ {
		if b[i]&0xfe != 0xe8 {
			continue
		}
		gap := i - prev
		prev = i
		if gap > 3 {
			mask = 0
		} else if mask = mask << (gap - 1) & 7; mask != 0 {
			if !allowed[mask] || ends(b[i+4-int(bit[mask])]) {
				mask = mask<<1 | 1
				continue
			}
		}
		if !ends(b[i+4]) {
			mask = mask<<1 | 1
			continue
		}
		src := binary.LittleEndian.Uint32(b[i+1:])
		var dest uint32
		for {
			dest = src - uint32(i+5)
			if mask == 0 {
				break
			}
			j := bit[mask] * 8
			if !ends(byte(dest >> (24 - j))) {
				break
			}
			src = dest ^ (1<<(32-j) - 1)
		}
		dest &= 0x01ffffff
		dest |= -(dest & 0x01000000)
		binary.LittleEndian.PutUint32(b[i+1:], dest)
		i += 4
	}
}
