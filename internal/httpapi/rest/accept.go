package rest

import (
	"mime"
	"net/http"
	"strconv"
	"strings"

	"cloche.dev/cloche/internal/sandbox"
)

// Negotiate chooses among offers by r's Accept; the first is for who doesn't
// mind. Of those equally wanted the one named most exactly wins, then the one
// offered first.
func Negotiate(r *http.Request, offers ...string) (string, error) {
	header := strings.Join(r.Header.Values("Accept"), ",")
	if strings.TrimSpace(header) == "" {
		return offers[0], nil
	}
	best, bestQ, bestExact := "", 0.0, -1
	for _, offer := range offers {
		if q, exact := wanted(header, offer); q > bestQ || q > 0 && q == bestQ && exact > bestExact {
			best, bestQ, bestExact = offer, q, exact
		}
	}
	if best != "" {
		return best, nil
	}
	e := sandbox.Errorf(sandbox.Invalid, "not_acceptable", "Accept names no form that this can be had in")
	return "", WithStatus(http.StatusNotAcceptable, e.WithHint("accept one of %s", strings.Join(offers, ", ")))
}

// wanted tells how much Accept wants offer, and how exactly it names it: the
// most exact range that covers it counts.
func wanted(header, offer string) (q float64, exact int) {
	exact = -1
	kind, _, _ := strings.Cut(offer, "/")
	for part := range strings.SplitSeq(header, ",") {
		name, params, err := mime.ParseMediaType(part)
		if err != nil {
			continue
		}
		level := -1
		switch name {
		case offer:
			level = 2
		case kind + "/*":
			level = 1
		case "*/*":
			level = 0
		}
		if level <= exact {
			continue
		}
		exact, q = level, 1
		if v, ok := params["q"]; ok {
			f, err := strconv.ParseFloat(v, 64)
			if err != nil || f < 0 || f > 1 {
				f = 0
			}
			q = f
		}
	}
	return q, exact
}
