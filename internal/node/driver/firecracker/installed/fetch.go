package installed

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

const (
	fetchWait    = 15 * time.Minute
	maxRedirects = 5
)

// IsURL tells whether an archive is to be fetched.
func IsURL(archive string) bool { return strings.Contains(archive, "://") }

// Fetch makes an archive, a URL (https or http) or a file, a file whose SHA-256
// is pin, in hex. A URL needs a pin, so that it does not matter who answers; a
// file may go without. What is fetched is written to dir and is only returned
// when its hash is right.
func Fetch(ctx context.Context, archive, pin, dir string) (string, error) {
	pin = strings.ToLower(strings.TrimPrefix(pin, "sha256:"))
	switch {
	case pin == "" && IsURL(archive):
		return "", sandbox.Errorf(sandbox.Invalid, "hash_missing", "an archive from a URL needs its SHA-256").
			WithHint("add --sha256 HEX, which the upstream release has beside it (.sha256.txt)")
	case pin != "" && !validHash(pin):
		return "", sandbox.Errorf(sandbox.Invalid, "hash_invalid", "%.80q is no SHA-256 in hex", pin)
	}
	if !IsURL(archive) {
		if pin == "" {
			return archive, nil
		}
		// A copy, so that what is hashed is what is unpacked.
		f, err := os.Open(archive)
		if err != nil {
			return "", err
		}
		defer f.Close()
		return keep(ctx, f, pin, dir)
	}
	u, err := url.Parse(archive)
	if err != nil || u.Host == "" || u.Scheme != "https" && u.Scheme != "http" {
		return "", sandbox.Errorf(sandbox.Invalid, "url_invalid", "the archive's URL must begin with https:// or http:// and name a host")
	}
	return fetch(ctx, client(), u, pin, dir)
}

// client follows few redirects, and none from https to http.
func client() *http.Client {
	return &http.Client{CheckRedirect: func(r *http.Request, via []*http.Request) error {
		if len(via) > maxRedirects {
			return errors.New("too many redirects")
		}
		if via[len(via)-1].URL.Scheme == "https" && r.URL.Scheme != "https" {
			return errors.New("a redirect from https to http")
		}
		return nil
	}}
}

func fetch(ctx context.Context, c *http.Client, u *url.URL, pin, dir string) (string, error) {
	waited, cancel := context.WithTimeout(ctx, fetchWait)
	defer cancel()
	req, err := http.NewRequestWithContext(waited, http.MethodGet, u.String(), nil)
	if err != nil {
		return "", err
	}
	failed := func(err error) error {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		// The error of a request names its URL, which may hold a password.
		var ue *url.Error
		if errors.As(err, &ue) {
			err = ue.Err
		}
		return sandbox.Errorf(sandbox.Unavailable, "fetch_failed", "the archive can't be fetched from %s: %w", u.Host, err).
			WithHint("fetch it yourself and name the file with --archive")
	}
	resp, err := c.Do(req)
	if err != nil {
		return "", failed(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return "", failed(fmt.Errorf("the answer is %d", resp.StatusCode))
	}
	path, err := keep(waited, resp.Body, pin, dir)
	var known *sandbox.Error
	var host *os.PathError
	if err != nil && !errors.As(err, &known) && !errors.As(err, &host) {
		err = failed(err)
	}
	return path, err
}

// keep writes an archive to dir and checks its hash.
func keep(ctx context.Context, r io.Reader, pin, dir string) (string, error) {
	path, h := filepath.Join(dir, "archive"), sha256.New()
	if err := save(path, io.TeeReader(&bounded{ctx: ctx, r: r, left: maxArchive}, h), maxArchive); err != nil {
		return "", err
	}
	if got := hex.EncodeToString(h.Sum(nil)); got != pin {
		return "", sandbox.Errorf(sandbox.Invalid, "hash_differs", "the archive's SHA-256 is %s, not %s", got, pin).
			WithHint("nothing of it was used; compare with what upstream publishes")
	}
	return path, nil
}
