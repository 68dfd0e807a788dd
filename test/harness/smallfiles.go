package harness

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"time"
)

// SmallFiles is how long it takes to read the same small files in one sandbox,
// once from the template's image and once from a directory of the host through
// a gofer: the median of interleaved rounds.
type SmallFiles struct {
	Files         int
	Image, Gofer  time.Duration
	ImageBy, GoBy []time.Duration // round by round
}

// Ratio is the image's time over the gofer's.
func (s SmallFiles) Ratio() float64 { return s.Image.Seconds() / s.Gofer.Seconds() }

// listSmall prints the paths of 10 000 files of the template of at most
// 64 KiB, without the slash that they begin with. A template that has fewer
// begins again with the first ones, which no cache still holds by then.
const listSmall = `
import os
names = []
for top in ('/usr', '/etc', '/var'):
    for d, ds, fs in os.walk(top):
        ds.sort()
        for f in sorted(fs):
            p = os.path.join(d, f)
            if '\n' not in p and not os.path.islink(p) and os.path.getsize(p) <= 65536:
                names.append(p[1:])
names = (names + names)[:10000]
print('\n'.join(names))
`

// readSmall reads the listed files below each of two roots, in turns.
const readSmall = `
import json, os, sys, time
names = open('/tmp/list').read().splitlines()
def read(root):
    t = time.monotonic()
    total = 0
    for n in names:
        f = os.open(root + n, os.O_RDONLY)
        total += len(os.read(f, 65536))
        os.close(f)
    return time.monotonic() - t, total
a, b = [], []
for i in range(int(sys.argv[2])):
    x, n = read('/')
    y, m = read(sys.argv[1])
    assert n == m, (n, m)
    a.append(x)
    b.append(y)
print(json.dumps({'files': len(names), 'image': a, 'gofer': b}))
`

// ReadSmallFiles measures it in a sandbox of the template base. The directory
// that carries the agent's socket into the sandbox is a bind mount that a gofer
// serves, so what lies in it on the host is read through that.
func (d *Daemon) ReadSmallFiles(rounds int) SmallFiles {
	d.tb.Helper()
	box := d.Must("create", "--memory", "2GiB", "base")
	shared := filepath.Join(d.Run, "m", box, "host", "files")
	if err := os.MkdirAll(shared, 0o755); err != nil {
		d.tb.Fatal(err)
	}
	defer os.RemoveAll(shared)
	d.Must("exec", "-u", "root", box, "--", "bash", "-c", `python3 -c "$1" > /tmp/list`, "list", listSmall)
	out := d.Command(d.tb.Context(), "exec", "-u", "root", box, "--", "bash", "-c", "sort -u /tmp/list | tar -C / -cf - -T -")
	in := exec.CommandContext(d.tb.Context(), "tar", "-C", shared, "-xf", "-")
	pipe, err := in.StdinPipe()
	if err != nil {
		d.tb.Fatal(err)
	}
	out.Stdout = pipe
	if err := in.Start(); err != nil {
		d.tb.Fatal(err)
	}
	if err := out.Run(); err != nil {
		d.tb.Fatalf("copy the files out: %v", err)
	}
	_ = pipe.Close()
	if err := in.Wait(); err != nil {
		d.tb.Fatalf("unpack the files: %v", err)
	}
	text := d.Must("exec", "-u", "root", box, "--", "python3", "-c", readSmall, "/.cloche/host/files/", strconv.Itoa(rounds))
	var told struct {
		Files        int
		Image, Gofer []float64
	}
	if err := json.Unmarshal([]byte(text), &told); err != nil {
		d.tb.Fatalf("%v: %q", err, text)
	}
	d.Must("rm", box)
	s := SmallFiles{Files: told.Files, ImageBy: durations(told.Image), GoBy: durations(told.Gofer)}
	s.Image, s.Gofer = median(s.ImageBy), median(s.GoBy)
	return s
}

// SmallFilesOf starts a daemon for the measurement alone.
func SmallFilesOf(tb testing.TB, rounds int) SmallFiles {
	tb.Helper()
	return Start(tb).ReadSmallFiles(rounds)
}

func durations(seconds []float64) []time.Duration {
	var all []time.Duration
	for _, s := range seconds {
		all = append(all, time.Duration(s*float64(time.Second)))
	}
	return all
}

func median(all []time.Duration) time.Duration {
	sorted := slices.Sorted(slices.Values(all))
	return sorted[len(sorted)/2]
}
