package supervisor

import (
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"cloche.dev/cloche/internal/guest/fault"
	"cloche.dev/cloche/internal/guest/wire"
)

const (
	blockSize  = 64 << 10
	blockCount = 256      // 16 MiB unacknowledged in all
	blockSpare = 32       // kept for sessions that hold none, so that greedy ones don't starve them
	logSize    = 1 << 20  // unacknowledged per session
	maxRuns    = 16 << 10 // changes between stdout and stderr, unacknowledged per session
	trimAfter  = 5 * time.Second
)

// arena is the memory of all unacknowledged output: one anonymous mapping that
// costs nothing until it is used, and is given back when it stands empty.
type arena struct {
	mu    sync.Mutex
	mem   []byte
	free  []int // a stack, so that few blocks are ever touched
	freed chan struct{}
	trim  *time.Timer
}

func newArena() (*arena, error) {
	mem, err := unix.Mmap(-1, 0, blockSize*blockCount, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE|unix.MAP_NORESERVE)
	if err != nil {
		return nil, err
	}
	a := &arena{mem: mem, freed: make(chan struct{})}
	for i := blockCount - 1; i >= 0; i-- {
		a.free = append(a.free, i)
	}
	a.trim = time.AfterFunc(trimAfter, a.giveBack)
	a.trim.Stop()
	return a, nil
}

// take returns a block, or -1. A session that holds none may have the last.
func (a *arena) take(holdsNone bool) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	n := len(a.free)
	if n == 0 || n <= blockSpare && !holdsNone {
		return -1
	}
	b := a.free[n-1]
	a.free = a.free[:n-1]
	return b
}

// has tells whether take would find a block, and if not gives a channel that
// is closed when it may.
func (a *arena) has(holdsNone bool) (bool, <-chan struct{}) {
	a.mu.Lock()
	defer a.mu.Unlock()
	n := len(a.free)
	return n > blockSpare || holdsNone && n > 0, a.freed
}

func (a *arena) put(blocks ...int) {
	if len(blocks) == 0 {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.free) <= blockSpare {
		close(a.freed)
		a.freed = make(chan struct{})
	}
	a.free = append(a.free, blocks...)
	if len(a.free) == blockCount {
		a.trim.Reset(trimAfter)
	}
}

func (a *arena) giveBack() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.free) == blockCount {
		_ = unix.Madvise(a.mem, unix.MADV_DONTNEED) // only saves memory
	}
}

func (a *arena) block(i int) []byte { return a.mem[i*blockSize : (i+1)*blockSize] }

// outlog is one session's unacknowledged output, in the order in which it was
// read. All blocks but the last are full. The session's lock guards it.
type outlog struct {
	arena  *arena
	blocks []int
	head   int    // bytes of the first block that are acknowledged
	base   uint64 // the offset up to which output is acknowledged
	end    uint64 // the offset up to which output was read
	runs   []wire.Run
}

// room tells whether output can be read. If not, wait is closed when it may be
// worth asking again, or nil: then only an acknowledgement can help.
func (l *outlog) room() (ok bool, wait <-chan struct{}) {
	if l.end-l.base >= logSize || len(l.runs) >= maxRuns {
		return false, nil
	}
	if l.used() < len(l.blocks)*blockSize {
		return true, nil
	}
	return l.arena.has(len(l.blocks) == 0)
}

// used is the number of bytes in blocks, the acknowledged head included.
func (l *outlog) used() int { return l.head + int(l.end-l.base) }

// readInto reads once from fd to the log's end.
func (l *outlog) readInto(fd int, stderr bool) (int, error) {
	used := l.used()
	var iov [][]byte
	if used < len(l.blocks)*blockSize {
		iov = append(iov, l.arena.block(l.blocks[used/blockSize])[used%blockSize:])
	}
	if b := l.arena.take(len(l.blocks) == 0); b >= 0 {
		l.blocks = append(l.blocks, b)
		iov = append(iov, l.arena.block(b))
	}
	if len(iov) == 0 {
		return 0, unix.ENOBUFS
	}
	tail := iov[0]
	left := int(logSize - (l.end - l.base))
	for i := range iov {
		iov[i] = iov[i][:min(len(iov[i]), left)]
		left -= len(iov[i])
	}
	n, err := readv(fd, iov)
	if n > 0 {
		if fault.Is(fault.OutputLost) && n > 1 {
			copy(tail, tail[1:min(n, len(tail))])
			n--
		}
		l.add(n, stderr)
	}
	keep := (l.used() + blockSize - 1) / blockSize
	if keep < len(l.blocks) {
		l.arena.put(l.blocks[keep:]...)
		l.blocks = l.blocks[:keep]
	}
	return n, err
}

func readv(fd int, iov [][]byte) (int, error) {
	for {
		n, err := unix.Readv(fd, iov)
		if err != unix.EINTR {
			return max(n, 0), err
		}
	}
}

func (l *outlog) add(n int, stderr bool) {
	if fault.Is(fault.Swapped) {
		stderr = !stderr
	}
	l.end += uint64(n)
	if k := len(l.runs); k > 0 && l.runs[k-1].Stderr == stderr {
		l.runs[k-1].N += n
		return
	}
	l.runs = append(l.runs, wire.Run{Stderr: stderr, N: n})
}

// fetch copies output from offset on; the caller has checked that offset lies
// in the log.
func (l *outlog) fetch(offset uint64, into *wire.Fetched) {
	n := int(min(l.end-offset, wire.MaxFetch))
	skip := int(offset - l.base)
	into.Data = make([]byte, 0, n)
	for at := l.head + skip; len(into.Data) < n; {
		b := l.arena.block(l.blocks[at/blockSize])[at%blockSize:]
		b = b[:min(len(b), n-len(into.Data))]
		into.Data = append(into.Data, b...)
		at += len(b)
	}
	for _, r := range l.runs {
		if skip >= r.N {
			skip -= r.N
			continue
		}
		r.N = min(r.N-skip, n)
		if skip, n = 0, n-r.N; r.N > 0 {
			into.Runs = append(into.Runs, r)
		}
		if n == 0 {
			return
		}
	}
}

// ack frees what lies before offset.
func (l *outlog) ack(offset uint64) {
	if offset <= l.base {
		return
	}
	n := int(offset - l.base)
	drop := (l.head + n) / blockSize
	if offset == l.end { // the last block may be partly filled, but nothing of it is needed
		drop = len(l.blocks)
		l.head = 0
	} else {
		l.head = (l.head + n) % blockSize
	}
	l.arena.put(l.blocks[:drop]...)
	l.blocks = append(l.blocks[:0], l.blocks[drop:]...)
	l.base = offset
	gone := 0
	for n > 0 && n >= l.runs[gone].N {
		n -= l.runs[gone].N
		gone++
	}
	l.runs = append(l.runs[:0], l.runs[gone:]...)
	if n > 0 {
		l.runs[0].N -= n
	}
	if len(l.runs) == 0 && cap(l.runs) > 64 {
		l.runs = nil
	}
}

func (l *outlog) free() {
	l.arena.put(l.blocks...)
	l.blocks, l.runs, l.head, l.base = nil, nil, 0, l.end
}
