package log

import (
	"bytes"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func open(t testing.TB, dir string, opt Options) *Log {
	t.Helper()
	l, err := Open(dir, opt)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	return l
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// readAll reads what is there now: the bytes, and the gaps as ranges.
func readAll(t testing.TB, l *Log, from uint64) (out []byte, gaps [][2]uint64) {
	t.Helper()
	r := l.NewReader(from)
	defer r.Close()
	at := from
	for {
		rec, ok, err := r.Next()
		must(t, err)
		if !ok {
			if r.Offset() != at {
				t.Fatalf("reader is at %d, the records led to %d", r.Offset(), at)
			}
			return out, gaps
		}
		if rec.Offset != at {
			t.Fatalf("record at %d, want %d", rec.Offset, at)
		}
		at = rec.End()
		if rec.Type == Gap {
			gaps = append(gaps, [2]uint64{rec.Offset, rec.To})
			continue
		}
		out = append(out, rec.Data...)
	}
}

func noise(seed uint64, n int) []byte {
	b := make([]byte, n)
	c := rand.NewChaCha8([32]byte{byte(seed)})
	_, _ = c.Read(b)
	return b
}

func TestRoundTrip(t *testing.T) {
	dir := t.TempDir()
	l := open(t, dir, Options{Segment: 100 << 10})
	data := noise(1, 3<<20)
	rng := rand.New(rand.NewPCG(1, 2))
	must(t, l.Append(Starting, nil))
	must(t, l.Append(Started, []byte(`{"pid":1}`)))
	for rest := data; len(rest) > 0; {
		n := min(len(rest), rng.IntN(40<<10))
		must(t, l.Append(Stdout+Type(rng.IntN(2)), rest[:n]))
		rest = rest[n:]
		if rng.IntN(4) == 0 {
			must(t, l.Flush())
		}
	}
	must(t, l.Append(Exit, []byte("x")))
	must(t, l.Sync())
	check := func(l *Log) {
		t.Helper()
		for _, from := range []int{0, 1, 70_000, len(data) / 2, len(data) - 1, len(data)} {
			got, gaps := readAll(t, l, uint64(from))
			if !bytes.Equal(got, data[from:]) || gaps != nil {
				t.Fatalf("from %d: %d bytes, gaps %v", from, len(got), gaps)
			}
		}
	}
	check(l)
	again := open(t, dir, Options{})
	check(again)
	if tail := again.Tail(); tail == nil || tail.Type != Exit || string(tail.Data) != "x" || tail.Offset != uint64(len(data)) {
		t.Fatalf("tail %+v", tail)
	}
	if s, asked := again.Beginning(); string(s) != `{"pid":1}` || !asked {
		t.Fatalf("beginning %q %v", s, asked)
	}
	check(open(t, dir, Options{Sealed: true, End: uint64(len(data))}))
}

func TestSmallOutputIsOneRecord(t *testing.T) {
	l := open(t, t.TempDir(), Options{})
	for range 100_000 {
		must(t, l.Append(Stdout, []byte("x")))
	}
	must(t, l.Flush())
	if l.Bytes() > 100_000+10*headerSize {
		t.Fatalf("%d bytes on disk for 100000", l.Bytes())
	}
}

func TestQuotaTellsExactGap(t *testing.T) {
	l := open(t, t.TempDir(), Options{Quota: 1 << 20})
	early := l.NewReader(0)
	defer early.Close()
	data := noise(2, 5<<20)
	must(t, l.Append(Stdout, data[:200<<10]))
	must(t, l.Flush())
	rec, ok, err := early.Next()
	if !ok || err != nil || rec.Offset != 0 {
		t.Fatal(rec.Offset, ok, err)
	}
	read := rec.End()
	must(t, l.Append(Stdout, data[200<<10:]))
	must(t, l.Flush())
	if l.Bytes() > 1<<20 {
		t.Fatalf("%d bytes kept", l.Bytes())
	}
	first := l.First()
	got, gaps := readAll(t, l, 0)
	if len(gaps) != 1 || gaps[0] != [2]uint64{0, first} || !bytes.Equal(got, data[first:]) {
		t.Fatalf("gaps %v, first %d, %d bytes", gaps, first, len(got))
	}
	// The reader that fell behind gets what it holds, then the rest as a gap.
	for {
		rec, ok, err = early.Next()
		if !ok || err != nil || rec.Offset != read {
			t.Fatal(rec.Offset, read, ok, err)
		}
		if rec.Type == Gap {
			break
		}
		read = rec.End()
	}
	if rec.To != first {
		t.Fatalf("gap to %d, first is %d", rec.To, first)
	}
	if rec, ok, err = early.Next(); !ok || err != nil || !bytes.Equal(rec.Data, data[first:first+uint64(len(rec.Data))]) {
		t.Fatal("wrong bytes after the gap")
	}
}

func TestTornTail(t *testing.T) {
	src := t.TempDir()
	l := open(t, src, Options{})
	data := noise(3, 200<<10)
	for rest := data; len(rest) > 0; {
		n := min(len(rest), 777)
		must(t, l.Append(Stdout, rest[:n]))
		must(t, l.Flush())
		rest = rest[n:]
	}
	name := filepath.Base(l.path(0))
	whole, err := os.ReadFile(l.path(0))
	must(t, err)
	rng := rand.New(rand.NewPCG(3, 4))
	for range 200 {
		cut := rng.IntN(len(whole))
		torn := append([]byte(nil), whole[:cut]...)
		switch rng.IntN(3) {
		case 0:
			torn = append(torn, make([]byte, rng.IntN(5000))...) // zeros, as file systems leave them
		case 1:
			torn = append(torn, noise(rng.Uint64(), rng.IntN(5000))...)
		}
		dir := t.TempDir()
		must(t, os.WriteFile(filepath.Join(dir, name), torn, 0o600))
		l := open(t, dir, Options{})
		got, gaps := readAll(t, l, 0)
		if !bytes.HasPrefix(data, got) || gaps != nil || len(got) < cut-cut/777*headerSize-2*777-headerSize {
			t.Fatalf("cut %d: %d bytes, gaps %v", cut, len(got), gaps)
		}
		must(t, l.Append(Stdout, data[len(got):]))
		must(t, l.Sync())
		if got, gaps = readAll(t, l, 0); !bytes.Equal(got, data) || gaps != nil {
			t.Fatalf("cut %d: after going on %d bytes, gaps %v", cut, len(got), gaps)
		}
	}
}

func TestDamageInTheMiddleIsAGap(t *testing.T) {
	dir := t.TempDir()
	l := open(t, dir, Options{Segment: 64 << 10})
	data := noise(4, 1<<20)
	must(t, l.Append(Stdout, data))
	must(t, l.Sync())
	bases := l.segs
	if len(bases) < 4 {
		t.Fatalf("%d segments", len(bases))
	}
	f, err := os.OpenFile(l.path(bases[1].base), os.O_WRONLY, 0)
	must(t, err)
	_, err = f.WriteAt([]byte("damage"), headerSize+10)
	must(t, err)
	must(t, f.Close())
	got, gaps := readAll(t, open(t, dir, Options{}), 0)
	want := append(append([]byte(nil), data[:bases[1].base]...), data[bases[2].base:]...)
	if len(gaps) != 1 || gaps[0] != [2]uint64{bases[1].base, bases[2].base} || !bytes.Equal(got, want) {
		t.Fatalf("gaps %v, %d bytes", gaps, len(got))
	}
	// A sealed log whose end is missing says so as well.
	last := bases[len(bases)-1]
	must(t, os.Truncate(l.path(last.base), 30))
	sealed := open(t, dir, Options{Sealed: true, End: uint64(len(data))})
	if _, gaps = readAll(t, sealed, 0); len(gaps) != 2 || gaps[1] != [2]uint64{last.base, uint64(len(data))} {
		t.Fatalf("gaps %v", gaps)
	}
	for sealed.DropOldest() > 0 {
	}
	if _, gaps = readAll(t, sealed, 5); len(gaps) != 1 || gaps[0] != [2]uint64{5, uint64(len(data))} {
		t.Fatalf("gaps %v", gaps)
	}
}

func TestSkip(t *testing.T) {
	dir := t.TempDir()
	l := open(t, dir, Options{})
	must(t, l.Append(Stdout, []byte("abc")))
	must(t, l.Skip(100))
	must(t, l.Append(Stderr, []byte("def")))
	must(t, l.Sync())
	for range 2 {
		got, gaps := readAll(t, l, 0)
		if string(got) != "abcdef" || len(gaps) != 1 || gaps[0] != [2]uint64{3, 100} {
			t.Fatalf("%q %v", got, gaps)
		}
		l = open(t, dir, Options{})
	}
}

func TestReadersAreWoken(t *testing.T) {
	l := open(t, t.TempDir(), Options{Quota: 2 << 20})
	const total = 20 << 20
	data := noise(5, 1<<20)
	done := make(chan uint64)
	for range 3 {
		go func() {
			r := l.NewReader(0)
			defer r.Close()
			for r.Offset() < total {
				changed := l.Changed()
				rec, ok, err := r.Next()
				if err != nil {
					t.Error(err)
					break
				}
				if !ok {
					<-changed
					continue
				}
				for i, c := range rec.Data {
					if c != data[(rec.Offset+uint64(i))%uint64(len(data))] {
						t.Errorf("wrong byte at %d", rec.Offset+uint64(i))
						break
					}
				}
			}
			done <- r.Offset()
		}()
	}
	for n := 0; n < total; n += len(data) {
		must(t, l.Append(Stdout, data))
		must(t, l.Sync())
	}
	must(t, l.Flush())
	for range 3 {
		select {
		case at := <-done:
			if at != total {
				t.Errorf("reader ended at %d", at)
			}
		case <-time.After(20 * time.Second):
			t.Fatal("a reader was not woken")
		}
	}
}

// FuzzScan: whatever is on disk, opening never fails and what is read is what
// the checksums vouch for, in order and without overlap.
func FuzzScan(f *testing.F) {
	b := appendHeader(nil, Starting, 0, 0)
	b = append(appendHeader(b, Stdout, 0, 5), "hello"...)
	b = append(appendHeader(b, Stderr, 5, 5), "world"...)
	b = append(appendHeader(b, Exit, 10, 2), "{}"...)
	seal(b)
	f.Add(b, []byte(nil))
	f.Add(b[:len(b)-1], []byte("junk"))
	f.Add(bytes.Repeat([]byte{0}, 100), b)
	f.Add([]byte(nil), bytes.Repeat([]byte{0xff}, 100))
	f.Fuzz(func(t *testing.T, one, two []byte) {
		dir := t.TempDir()
		l := &Log{dir: dir}
		must(t, os.WriteFile(l.path(0), one, 0o600))
		must(t, os.WriteFile(l.path(7), two, 0o600))
		good, end, _, err := scan(bytes.NewReader(one), 0)
		if err != nil || good > int64(len(one)) || end > uint64(good) {
			t.Fatal(good, end, err)
		}
		again, _, _, _ := scan(bytes.NewReader(one[:good]), 0)
		if again != good {
			t.Fatalf("the good part of a log is good: %d, then %d", good, again)
		}
		readAll(t, open(t, dir, Options{}), 0)
		readAll(t, open(t, dir, Options{Sealed: true, End: 20}), 3)
	})
}

func BenchmarkAppend(b *testing.B) {
	for name, size := range map[string]int{"64KiB": 64 << 10, "100B": 100} {
		b.Run(name, func(b *testing.B) {
			l := open(b, b.TempDir(), Options{})
			data := noise(6, size)
			b.SetBytes(int64(size))
			for b.Loop() {
				must(b, l.Append(Stdout, data))
			}
			must(b, l.Flush())
		})
	}
}

func BenchmarkRead(b *testing.B) {
	l := open(b, b.TempDir(), Options{})
	must(b, l.Append(Stdout, noise(7, 64<<20)))
	must(b, l.Flush())
	b.SetBytes(64 << 20)
	for b.Loop() {
		r := l.NewReader(0)
		for {
			if _, ok, err := r.Next(); !ok || err != nil {
				break
			}
		}
		must(b, r.Close())
	}
}

// A log may begin anywhere; what lies before is a gap, however it is opened.
func TestBase(t *testing.T) {
	const base = 1 << 40
	dir := t.TempDir()
	data := noise(7, 300<<10)
	opt := Options{Base: base, Segment: 100 << 10}
	l := open(t, dir, opt)
	check := func(l *Log, want []byte) {
		t.Helper()
		for _, from := range []uint64{0, 5, base - 1, base} {
			out, gaps := readAll(t, l, from)
			if !bytes.Equal(out, want) {
				t.Fatalf("from %d: %d of %d bytes", from, len(out), len(want))
			}
			if from < base && (len(gaps) != 1 || gaps[0] != [2]uint64{from, base}) || from == base && gaps != nil {
				t.Fatalf("from %d: gaps %v", from, gaps)
			}
		}
	}
	if l.First() != base || l.Written() != base || l.Accepted() != base {
		t.Fatal(l.First(), l.Written(), l.Accepted())
	}
	check(l, nil)
	must(t, l.Append(Stdout, data))
	must(t, l.Append(Exit, []byte("x")))
	must(t, l.Sync())
	check(l, data)
	again := open(t, dir, opt)
	if tail := again.Tail(); tail == nil || tail.Offset != base+uint64(len(data)) || again.First() != base {
		t.Fatalf("%+v", again.Tail())
	}
	check(again, data)
	check(open(t, dir, Options{Sealed: true, End: base + uint64(len(data))}), data)
	if started, starting := again.Beginning(); started != nil || starting {
		t.Error("it has no beginning")
	}
}
