package main

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Three rounds on a machine that becomes ten times slower.
const threeRounds = `goos: linux
BenchmarkTraffic/endpoint=0s/load=many/tap=none/engine=compiled-2   10 1 ns/op 1000 req/s 100 allocs/op
BenchmarkTraffic/endpoint=0s/load=many/tap=inline/engine=compiled-2 10 1 ns/op  500 req/s 300 allocs/op
BenchmarkTraffic/endpoint=0s/load=many/tap=open/engine=interpreted-2 10 1 ns/op 600 req/s 400 allocs/op
BenchmarkTraffic/endpoint=0s/load=many/tap=none/engine=compiled-2   10 1 ns/op  200 req/s 100 allocs/op
BenchmarkTraffic/endpoint=0s/load=many/tap=inline/engine=compiled-2 10 1 ns/op  100 req/s 300 allocs/op
BenchmarkTraffic/endpoint=0s/load=many/tap=open/engine=interpreted-2 10 1 ns/op 110 req/s 402 allocs/op
BenchmarkTraffic/endpoint=0s/load=many/tap=none/engine=compiled-2   10 1 ns/op  100 req/s 100 allocs/op
BenchmarkTraffic/endpoint=0s/load=many/tap=inline/engine=compiled-2 10 1 ns/op   50 req/s 300 allocs/op
BenchmarkTraffic/endpoint=0s/load=many/tap=open/engine=interpreted-2 10 1 ns/op  65 req/s 401 allocs/op
PASS
`

func TestWrite_ComparesWithinARound(t *testing.T) {
	measured, err := read(strings.NewReader(threeRounds))
	require.NoError(t, err)

	var out strings.Builder
	require.NoError(t, write(&out, measured))
	assert.Equal(t, `50 clients on loopback: requests per second

| 50 clients | engine      | allocations added | endpoint 0s: requests/s | / no tap | / inline |
|------------|-------------|-------------------|-------------------------|----------|----------|
| inline     | compiled    | 200               | 100                     | 0.50     | 1.00     |
| open       | interpreted | 301               | 110                     | 0.60     | 1.20     |

`, out.String())
}

func TestText_IsTheMedianAndTheSpread(t *testing.T) {
	*spread = true
	t.Cleanup(func() { *spread = false })

	assert.Equal(t, "2.5 (1.0 to 9.0)", series{9, 2, 3, 1}.text("%.1f", 1))
	assert.Equal(t, "2", series{2, 2, 2}.text("%.0f", 1))
	assert.Equal(t, "3000 (3000 to 4000)", series{3, 4, 3}.text("%.0f", 1000))
	assert.Equal(t, "-", series{}.text("%.0f", 1))
}

func TestRead_WantsResults(t *testing.T) {
	_, err := read(strings.NewReader("FAIL\n"))
	assert.Error(t, err)
}
