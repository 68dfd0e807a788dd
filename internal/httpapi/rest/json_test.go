package rest

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"
)

func TestParse(t *testing.T) {
	deep := func(n int) string { return strings.Repeat("[", n) + strings.Repeat("]", n) }
	for _, c := range []struct {
		name, in string
		ok       bool
	}{
		{"object", `{"a":1,"b":[true,null,"x"]}`, true},
		{"scalar", `"x"`, true},
		{"space around", " {} \n", true},
		{"same name at two levels", `{"a":{"a":1}}`, true},
		{"deepest", deep(maxDepth), true},
		{"empty", ``, false},
		{"cut", `{"a":1`, false},
		{"cut list", `[1`, false},
		{"trailing value", `{} {}`, false},
		{"trailing garbage", `{}x`, false},
		{"duplicate", `{"a":1,"a":2}`, false},
		{"duplicate by escape", `{"a":1,"\u0061":2}`, false},
		{"too deep", deep(maxDepth + 1), false},
		{"far too deep", deep(100_000), false},
		{"not UTF-8", "{\"a\":\"\xff\"}", false},
		{"single quotes", `{'a':1}`, false},
		{"NaN", `NaN`, false},
		{"comma", `[1,]`, false},
		{"comment", `{}//`, false},
	} {
		if _, err := parse([]byte(c.in)); (err == nil) != c.ok {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

// FuzzParse: what the strict parser accepts, encoding/json reads as the same.
func FuzzParse(f *testing.F) {
	for _, s := range []string{`{"a":[1,2.5,"x",null,true]}`, `[]`, `{"a":1,"a":2}`, `{"a":{"b":{}}}`, "\"\xff\"", `1e999`, `{"a"`, `[[[[`, ``} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		got, err := parse(data)
		if err != nil {
			return
		}
		dec := json.NewDecoder(strings.NewReader(string(data)))
		dec.UseNumber()
		var want any
		if err := dec.Decode(&want); err != nil {
			t.Fatalf("accepted what is not JSON: %q: %v", data, err)
		}
		if !reflect.DeepEqual(got, want) {
			t.Fatalf("%q: %v and %v", data, got, want)
		}
	})
}
