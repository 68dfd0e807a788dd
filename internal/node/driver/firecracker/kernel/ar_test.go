package kernel

import (
	"bytes"
	"errors"
	"io"
	"testing"
)

func readAr(b []byte) (all []entry, err error) {
	r, err := newArReader(bytes.NewReader(b))
	if err != nil {
		return nil, err
	}
	for {
		name, _, err := r.Next()
		if errors.Is(err, io.EOF) {
			return all, nil
		}
		if err != nil {
			return all, err
		}
		data, err := io.ReadAll(r)
		if err != nil {
			return all, err
		}
		all = append(all, entry{name: name, data: data})
	}
}

func TestAr(t *testing.T) {
	b := ar(entry{name: "debian-binary", data: []byte("2.0\n")}, entry{name: "odd/", data: []byte("abc")}, entry{name: "none"}, entry{name: "last", data: []byte("x")})
	want := []entry{{name: "debian-binary", data: []byte("2.0\n")}, {name: "odd", data: []byte("abc")}, {name: "none", data: []byte{}}, {name: "last", data: []byte("x")}}
	for _, b := range [][]byte{b, b[:len(b)-1]} { // the last padding is often left out
		got, err := readAr(b)
		if err != nil || len(got) != len(want) {
			t.Fatalf("%v, %v", got, err)
		}
		for i, e := range want {
			if got[i].name != e.name || !bytes.Equal(got[i].data, e.data) {
				t.Errorf("member %d is %q %q", i, got[i].name, got[i].data)
			}
		}
	}
	// Members that nobody read are skipped.
	r, err := newArReader(bytes.NewReader(b))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range want {
		if name, size, err := r.Next(); err != nil || name != e.name || size != int64(len(e.data)) {
			t.Errorf("%q %d %v", name, size, err)
		}
	}
	if _, _, err := r.Next(); !errors.Is(err, io.EOF) {
		t.Error(err)
	}
	for i := 9; i < len(b)-1; i++ {
		if got, err := readAr(b[:i]); err == nil && len(got) > 0 && len(got[len(got)-1].data) > 0 && i != 8+60+4 && i != 8+60+4+60+3 && i != 8+60+4+60+4 {
			t.Errorf("cut at %d: %q", i, got)
		}
	}
	for _, bad := range []string{
		"", "!<arch>", "!<arch>\nshort", "!<thin>\n", string(bytes.Replace(b, []byte("`\n"), []byte("'\n"), 1)),
		string(bytes.Replace(b, []byte("4         `"), []byte("-4        `"), 1)), string(bytes.Replace(b, []byte("4         `"), []byte("99999999999"), 1)),
	} {
		if got, err := readAr([]byte(bad)); err == nil {
			t.Errorf("%q is %v", bad, got)
		}
	}
}

// FuzzAr: what is read is never more than there is.
func FuzzAr(f *testing.F) {
	f.Add(ar(entry{name: "debian-binary", data: []byte("2.0\n")}, entry{name: "data.tar", data: []byte("abc")}))
	f.Add(ar(entry{name: "/"}, entry{name: "x"}))
	f.Fuzz(func(t *testing.T, b []byte) {
		all, _ := readAr(b)
		n := 8
		for _, e := range all {
			n += 60 + len(e.data)
		}
		if len(all) > 0 && n > len(b) {
			t.Fatalf("%d bytes out of %d", n, len(b))
		}
	})
}
