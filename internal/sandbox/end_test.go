package sandbox

import (
	"testing"
	"time"
)

func TestAnEndTellsWhatIsLost(t *testing.T) {
	then := time.Date(2026, 11, 30, 1, 2, 3, 4, time.UTC)
	for _, c := range []struct {
		end  End
		then *time.Time
		want string
	}{
		{End{Detail: "x"}, &then, "x"},
		{End{Loses: true}, nil, "its disk is lost"},
		{End{Detail: "x", Loses: true}, nil, "x; its disk is lost"},
		{End{Detail: "x", Loses: true}, &then, "x; what its disk was given after 2026-11-30T01:02:03Z is lost"},
	} {
		told := c.end.Told(c.then)
		if told.Detail != c.want || told.Loses || told.Told(c.then) != told {
			t.Errorf("%+v is told as %+v, want %q", c.end, told, c.want)
		}
	}
}
