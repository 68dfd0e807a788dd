// Package pattern is the output that the benchmarks' commands write: every
// byte follows from its offset, and no two blocks are equal, so that whatever
// is lost, doubled or moved on the way is noticed. The program in
// test/bench/testdata/work writes it and test/bench checks it.
package pattern

import "encoding/binary"

// Block is the size in which the pattern is made.
const Block = 64 << 10

var base = func() (b [Block]byte) {
	x := uint64(0x9e3779b97f4a7c15)
	for i := 0; i < Block; i += 8 {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		binary.LittleEndian.PutUint64(b[i:], x)
	}
	return b
}()

// Fill fills a block with what stands at offset at, a multiple of Block.
func Fill(b []byte, at int64) {
	copy(b, base[:])
	binary.LittleEndian.PutUint64(b, uint64(at))
}

// Checker compares a stream with the pattern.
type Checker struct {
	at    int64
	block [Block]byte
	ok    bool // block is that of at
}

// Skip moves on to offset to.
func (c *Checker) Skip(to int64) { c.at, c.ok = to, false }

// Check takes the next bytes and tells whether they are what stands there.
func (c *Checker) Check(data []byte) bool {
	for len(data) > 0 {
		in := int(c.at % Block)
		if !c.ok || in == 0 {
			Fill(c.block[:], c.at-int64(in))
			c.ok = true
		}
		n := min(len(data), Block-in)
		if string(data[:n]) != string(c.block[in:in+n]) {
			return false
		}
		data, c.at = data[n:], c.at+int64(n)
	}
	return true
}
