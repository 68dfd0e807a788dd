package inject

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"maps"
	"net/http"
	"slices"
	"strings"

	"cloche.dev/cloche/internal/sandbox"
)

// What a sandbox's own signature consists of. All of it is removed.
var (
	sigV4Headers    = []string{"Authorization", "X-Amz-Date", "X-Amz-Security-Token", "X-Amz-Content-Sha256", "X-Amz-Region-Set"}
	sigV4Parameters = []string{
		"X-Amz-Algorithm", "X-Amz-Credential", "X-Amz-Date", "X-Amz-Expires", "X-Amz-Security-Token", "X-Amz-Signature", "X-Amz-SignedHeaders",
		"X-Amz-Region-Set", "AWSAccessKeyId",
	}
)

const (
	emptyHash       = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
	unsignedPayload = "UNSIGNED-PAYLOAD"
	// streamingUnsigned is a body in chunks that carry no signatures of their own.
	streamingUnsigned = "STREAMING-UNSIGNED-PAYLOAD-TRAILER"
)

// s3Family are the services whose paths are escaped once, and that take a body
// that the signature doesn't cover: TLS does.
var s3Family = []string{"s3", "s3-object-lambda", "s3-outposts", "s3express"}

// sign signs r by AWS Signature Version 4, in its headers. The path and query
// are sent in the very form that is signed.
func (i *Injector) sign(r *http.Request, a *Applied, s *secret, in sandbox.Injection) error {
	part := strings.SplitN(string(s.Value), ":", 3)
	if len(part) < 2 || part[0] == "" || part[1] == "" || in.Region == "" || in.Service == "" || !headerValue(string(s.Value)) || r.URL.Opaque != "" {
		return denied("secret_unusable", in, "can't sign").WithHint("its value is ACCESS_KEY_ID:SECRET_ACCESS_KEY[:SESSION_TOKEN], and its injection names region and service")
	}
	a.search(s.Value, s.patterns())
	for _, p := range part[1:] {
		a.search([]byte(p), patternsOf([]byte(p)))
	}
	s3 := slices.Contains(s3Family, in.Service)
	hash, err := i.payload(r, in, s3)
	if err != nil {
		return err
	}
	path := r.URL.Path
	if path == "" {
		path = "/"
	}
	r.URL.Path, r.URL.RawPath = path, awsEscape(path, true)
	signedPath := r.URL.RawPath
	if !s3 {
		signedPath = awsEscape(signedPath, true)
	}
	if r.URL.RawQuery, err = awsQuery(r.URL.RawQuery); err != nil {
		return denied("secret_query", in, "can't sign this query: %w", err)
	}
	now := i.now().UTC()
	stamp, day := now.Format("20060102T150405Z"), now.Format("20060102")
	removeHeader(r.Header, sigV4Headers...)
	r.Header.Set("X-Amz-Date", stamp)
	if len(part) == 3 && part[2] != "" {
		r.Header.Set("X-Amz-Security-Token", part[2])
	}
	if s3 {
		r.Header.Set("X-Amz-Content-Sha256", hash)
	}
	names, headers := signedHeaders(r)
	request := strings.Join([]string{r.Method, signedPath, r.URL.RawQuery, headers, names, hash}, "\n")
	scope := day + "/" + in.Region + "/" + in.Service + "/aws4_request"
	digest := sha256.Sum256([]byte(request))
	key := []byte("AWS4" + part[1])
	for _, step := range []string{day, in.Region, in.Service, "aws4_request"} {
		key = mac(key, step)
	}
	signature := hex.EncodeToString(mac(key, "AWS4-HMAC-SHA256\n"+stamp+"\n"+scope+"\n"+hex.EncodeToString(digest[:])))
	a.search([]byte(signature), patternsOf([]byte(signature)))
	r.Header.Set("Authorization", "AWS4-HMAC-SHA256 Credential="+part[0]+"/"+scope+", SignedHeaders="+names+", Signature="+signature)
	return nil
}

func mac(key []byte, s string) []byte {
	h := hmac.New(sha256.New, key)
	h.Write([]byte(s))
	return h.Sum(nil)
}

// payload is what the signature says of the body.
func (i *Injector) payload(r *http.Request, in sandbox.Injection, s3 bool) (string, error) {
	said := r.Header.Get("X-Amz-Content-Sha256")
	switch {
	case strings.HasPrefix(said, "STREAMING-") && (said != streamingUnsigned || !s3):
		return "", denied("secret_body", in, "can't sign a body whose chunks have signatures of their own").
			WithHint("have the client sign payloads as a whole or not at all")
	case s3 && said == streamingUnsigned:
		return said, nil
	case r.Body == nil || r.Body == http.NoBody:
		return emptyHash, nil
	case s3:
		return unsignedPayload, nil
	}
	body, err := i.hold(r, in)
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(body)
	return hex.EncodeToString(sum[:]), nil
}

// signedHeaders are the names and the lines that are signed: the host, the
// content's type, and all of Amazon's own.
func signedHeaders(r *http.Request) (names, lines string) {
	host := r.Host
	if host == "" {
		host = r.URL.Host
	}
	values := map[string][]string{"host": {host}}
	list := []string{"host"}
	for _, name := range slices.Sorted(maps.Keys(r.Header)) {
		k, v := strings.ToLower(name), r.Header[name]
		if k != "content-type" && !strings.HasPrefix(k, "x-amz-") {
			continue
		}
		if values[k] == nil {
			list = append(list, k)
		}
		values[k] = append(values[k], v...)
	}
	slices.Sort(list)
	var b strings.Builder
	for _, k := range list {
		b.WriteString(k + ":")
		for n, v := range values[k] {
			if n > 0 {
				b.WriteByte(',')
			}
			b.WriteString(strings.Join(strings.FieldsFunc(v, func(c rune) bool { return c == ' ' || c == '\t' }), " "))
		}
		b.WriteByte('\n')
	}
	return strings.Join(list, ";"), b.String()
}
