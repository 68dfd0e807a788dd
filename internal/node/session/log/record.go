package log

import (
	"encoding/binary"
	"errors"
	"hash/crc32"
)

// Type is what a record holds.
type Type uint8

// The record types. Output records have the width of their payload, all others
// none. Gap is never stored: a Reader makes it for a range that is gone.
const (
	Starting Type = 1 + iota // the guest is about to be asked to start
	Started
	Stdout
	Stderr
	Exit
	Lost
	Gap Type = 0xff
)

// Output tells whether the payload counts towards the offset.
func (t Type) Output() bool { return t == Stdout || t == Stderr }

// Final tells whether nothing comes after such a record.
func (t Type) Final() bool { return t == Exit || t == Lost }

// Record is one record. Data belongs to whoever returned the record and is
// valid until its next call.
type Record struct {
	Type   Type
	Offset uint64 // output bytes before it
	To     uint64 // of a Gap: the first offset behind it
	Data   []byte
}

// End is the offset behind the record.
func (r Record) End() uint64 {
	switch {
	case r.Type == Gap:
		return r.To
	case r.Type.Output():
		return r.Offset + uint64(len(r.Data))
	}
	return r.Offset
}

// MaxPayload bounds one record's payload, and with it what a reader holds.
const MaxPayload = 64 << 10

// A record is a header and its payload. Header, little endian: CRC-32C of all
// that follows (4), payload length (4), type (1), format version (1), zero
// (2), offset (8). The offset is there so that bytes of another place never
// pass for the record that is expected here.
const (
	headerSize    = 20
	formatVersion = 1
)

var (
	castagnoli = crc32.MakeTable(crc32.Castagnoli)

	errShort = errors.New("the record continues behind what was read")
	errBad   = errors.New("not a record")
)

// appendHeader appends the header of a record that is not sealed yet.
func appendHeader(b []byte, t Type, offset uint64, length int) []byte {
	b = append(b, 0, 0, 0, 0)
	b = binary.LittleEndian.AppendUint32(b, uint32(length))
	b = append(b, byte(t), formatVersion, 0, 0)
	return binary.LittleEndian.AppendUint64(b, offset)
}

func payloadLen(header []byte) int { return int(binary.LittleEndian.Uint32(header[4:])) }

func setPayloadLen(header []byte, n int) { binary.LittleEndian.PutUint32(header[4:], uint32(n)) }

// seal writes the checksums of the records that b consists of.
func seal(b []byte) {
	for len(b) > 0 {
		n := headerSize + payloadLen(b)
		binary.LittleEndian.PutUint32(b, crc32.Checksum(b[4:n], castagnoli))
		b = b[n:]
	}
}

// parse reads the record at the front of b, which must have the given offset,
// and tells its length.
func parse(b []byte, offset uint64) (Record, int, error) {
	if len(b) < headerSize {
		return Record{}, 0, errShort
	}
	length := binary.LittleEndian.Uint32(b[4:])
	t := Type(b[8])
	if length > MaxPayload || b[9] != formatVersion || t < Starting || t > Lost ||
		binary.LittleEndian.Uint64(b[12:]) != offset {
		return Record{}, 0, errBad
	}
	n := headerSize + int(length)
	if len(b) < n {
		return Record{}, 0, errShort
	}
	if crc32.Checksum(b[4:n], castagnoli) != binary.LittleEndian.Uint32(b) {
		return Record{}, 0, errBad
	}
	return Record{Type: t, Offset: offset, Data: b[headerSize:n:n]}, n, nil
}
