package linear_test
import "cloche.dev/cloche/internal/sandbox"
var tmpWrap func(sandbox.Store) sandbox.Store
