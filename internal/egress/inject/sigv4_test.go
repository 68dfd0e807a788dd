package inject_test

import (
	"bytes"
	"io"
	"net/http"
	"strings"
	"testing"

	"cloche.dev/cloche/internal/egress/inject"
	"cloche.dev/cloche/internal/sandbox"
)

const (
	awsID     = "AKIDEXAMPLE"
	awsSecret = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY" // of Amazon's own examples
)

func awsValue(v string) sandbox.SecretValue {
	return sandbox.SecretValue{Name: "aws", Hosts: []string{"example.amazonaws.com"}, Value: []byte(v)}
}

func signed(service string) []sandbox.Injection {
	return []sandbox.Injection{{Secret: "aws", Kind: sandbox.InjectSigV4, Region: "us-east-1", Service: service}}
}

func signature(r *http.Request) string {
	_, s, _ := strings.Cut(r.Header.Get("Authorization"), "Signature=")
	return s
}

// TestSigV4Vectors: Amazon's test suite for signature version 4, and what
// botocore makes of an escaped path and a JSON request.
func TestSigV4Vectors(t *testing.T) {
	for _, c := range []struct{ name, service, method, path, contentType, body, want string }{
		{"get-vanilla", "service", "GET", "/", "", "", "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31"},
		{"get-vanilla-query-order-key-case", "service", "GET", "/?Param2=value2&Param1=value1", "", "", "b97d918cfa904a5beff61c982a1b6f458b799221646efd99d3219ec94cdf2500"},
		{"post-vanilla", "service", "POST", "/", "", "", "5da7c1a2acd57cee7505fc6676e4e544621c30862966e37dddb68e92efbe5d6b"},
		{"post-x-www-form-urlencoded", "service", "POST", "/", "application/x-www-form-urlencoded", "Param1=value1", "ff11897932ad3f4e8b18135d722051e5ac45fc38421b1da7b9d196a0fe09473a"},
		{"escaped", "execute-api", "GET", "/documents%20and%20settings/a(b%29?b=2&a=x+y", "", "", "e029f87fcd2644f5d2fe9b40c386a688cd606faabb763085909b8dfbd882983f"},
		{"json", "dynamodb", "POST", "/", "application/x-amz-json-1.0", `{"TableName":"t"}`, "3b261a5547710a05c016502bda60a8e60f9721526e7b65d2f5cf1aa130937081"},
		{"s3", "s3", "GET", "/key", "", "", "76da36a3def91f5bb715170faf986e8967173f00d936d75de9914e0a173c1190"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := request(t, c.method, "https://example.amazonaws.com"+c.path, strings.NewReader(c.body))
			if c.contentType != "" {
				r.Header.Set("Content-Type", c.contentType)
			}
			if c.service == "dynamodb" {
				r.Header.Set("X-Amz-Target", "DynamoDB_20120810.DescribeTable")
			}
			// What the sandbox signed with its placeholder goes.
			r.Header.Set("Authorization", "AWS4-HMAC-SHA256 Credential=PLACEHOLDER")
			r.Header.Set("X-Amz-Security-Token", "placeholder")
			r.Header.Set("X-Amz-Content-Sha256", "placeholder")
			_, err := inject.New([]sandbox.SecretValue{awsValue(awsID + ":" + awsSecret)}, at(noon)).Apply(r, "example.amazonaws.com", 443, signed(c.service))
			if err != nil {
				t.Fatal(err)
			}
			if got := signature(r); got != c.want {
				t.Errorf("%s of %s", got, r.Header)
			}
			if b, err := io.ReadAll(r.Body); string(b) != c.body || err != nil || r.ContentLength != int64(len(c.body)) {
				t.Errorf("%q %v %d", b, err, r.ContentLength)
			}
		})
	}
}

// TestSigV4S3: S3's own ways, and a session token.
func TestSigV4S3(t *testing.T) {
	inj := inject.New([]sandbox.SecretValue{awsValue(awsID + ":" + awsSecret + ":session/token==")}, at(noon))
	r := request(t, "PUT", "https://example.amazonaws.com/a(b)%20c/d?acl&X-Amz-Signature=1&x-amz-credential=2&prefix=a+b%2Fc&AWSAccessKeyId=3", io.MultiReader(strings.NewReader("streams")))
	if _, err := inj.Apply(r, "example.amazonaws.com", 443, signed("s3")); err != nil {
		t.Fatal(err)
	}
	if got := r.URL.RequestURI(); got != "/a%28b%29%20c/d?acl=&prefix=a%20b%2Fc" {
		t.Error(got)
	}
	auth := r.Header.Get("Authorization")
	if r.Header.Get("X-Amz-Content-Sha256") != "UNSIGNED-PAYLOAD" || r.Header.Get("X-Amz-Security-Token") != "session/token==" || r.ContentLength > 0 ||
		!strings.Contains(auth, "SignedHeaders=host;x-amz-content-sha256;x-amz-date;x-amz-security-token,") || strings.Contains(auth, awsSecret) {
		t.Errorf("%v", r.Header)
	}
	for _, c := range []struct{ service, hash, want string }{
		{"s3", "STREAMING-UNSIGNED-PAYLOAD-TRAILER", ""},
		{"s3", "STREAMING-AWS4-HMAC-SHA256-PAYLOAD", "secret_body"},
		{"lambda", "STREAMING-UNSIGNED-PAYLOAD-TRAILER", "secret_body"},
	} {
		r := request(t, "PUT", "https://example.amazonaws.com/", strings.NewReader("x"))
		r.Header.Set("X-Amz-Content-Sha256", c.hash)
		_, err := inj.Apply(r, "example.amazonaws.com", 443, signed(c.service))
		if codeOf(err) != c.want || err == nil && r.Header.Get("X-Amz-Content-Sha256") != c.hash {
			t.Errorf("%+v: %v", c, err)
		}
	}
}

// TestSigV4Bodies: one that is too large is refused, also where it doesn't say
// so; what is held is given back.
func TestSigV4Bodies(t *testing.T) {
	inj := inject.New([]sandbox.SecretValue{awsValue(awsID + ":" + awsSecret)}, at(noon))
	apply := func(r *http.Request) string {
		_, err := inj.Apply(r, "example.amazonaws.com", 443, signed("service"))
		return codeOf(err)
	}
	big := bytes.Repeat([]byte("x"), 17<<20)
	for range 6 { // more than may be held at once
		if got := apply(request(t, "POST", "https://example.amazonaws.com/", bytes.NewReader(big))); got != "secret_body" {
			t.Error(got)
		}
		if got := apply(request(t, "POST", "https://example.amazonaws.com/", io.MultiReader(bytes.NewReader(big)))); got != "secret_body" {
			t.Error(got)
		}
		r := request(t, "POST", "https://example.amazonaws.com/", io.MultiReader(bytes.NewReader(big[:15<<20])))
		if got := apply(r); got != "" || r.ContentLength != 15<<20 {
			t.Error(got, r.ContentLength)
		}
		_ = r.Body.Close()
		_ = r.Body.Close()
	}
	var open []*http.Request
	refused := false
	for range 5 {
		r := request(t, "POST", "https://example.amazonaws.com/", bytes.NewReader(big[:15<<20]))
		if got := apply(r); got == "secret_body" {
			refused = true
			break
		}
		open = append(open, r)
	}
	if !refused || len(open) != 4 {
		t.Errorf("%d held at once", len(open))
	}
	_ = open[0].Body.Close()
	if got := apply(request(t, "POST", "https://example.amazonaws.com/", bytes.NewReader(big[:15<<20]))); got != "" {
		t.Error(got)
	}
	if got := apply(request(t, "POST", "https://example.amazonaws.com/", io.MultiReader(strings.NewReader("x"), broken{}))); got != "secret_body" {
		t.Error(got)
	}
	if got := apply(request(t, "GET", "https://example.amazonaws.com/?%zz", nil)); got != "secret_query" {
		t.Error(got)
	}
}

type broken struct{}

func (broken) Read([]byte) (int, error) { return 0, io.ErrUnexpectedEOF }

func FuzzQuery(f *testing.F) {
	for _, s := range []string{"", "a=1&k=2;K=3", "k[]=1&&=", "%6b=1", "k%00=1", "+k=1", "%zz"} {
		f.Add(s)
	}
	inj := inject.New([]sandbox.SecretValue{awsValue(awsID + ":" + awsSecret)}, at(noon))
	f.Fuzz(func(t *testing.T, query string) {
		r := request(t, "GET", "https://example.amazonaws.com/", nil)
		r.URL.RawQuery = query
		in := []sandbox.Injection{{Secret: "aws", Kind: sandbox.InjectQuery, Name: "k"}}
		if _, err := inj.Apply(r, "example.amazonaws.com", 443, in); err != nil {
			return
		}
		n := 0
		for element := range strings.FieldsFuncSeq(r.URL.RawQuery, func(c rune) bool { return c == '&' || c == ';' }) {
			if k, _, _ := strings.Cut(element, "="); strings.EqualFold(k, "k") {
				n++
			}
		}
		if n != 1 || !strings.HasSuffix(r.URL.RawQuery, "k=AKIDEXAMPLE%3AwJalrXUtnFEMI%2FK7MDENG%2BbPxRfiCYEXAMPLEKEY") {
			t.Errorf("%q became %q", query, r.URL.RawQuery)
		}
		again := r.URL.RawQuery
		if _, err := inj.Apply(r, "example.amazonaws.com", 443, in); err != nil || r.URL.RawQuery != again {
			t.Errorf("%q became %q: %v", again, r.URL.RawQuery, err)
		}
	})
}
