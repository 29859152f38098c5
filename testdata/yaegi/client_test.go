package yaegi_test

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/traefik-tap/tap/testdata/cost"
)

// client is one connection that is kept alive. It is no http.Client, which would take as much of the machine as all it measures.
type client struct {
	conn   net.Conn
	reader *bufio.Reader
	small  []byte
}

func dialClient(address string) (*client, error) {
	conn, err := net.Dial("tcp", address)
	if err != nil {
		return nil, err
	}
	if err := conn.SetDeadline(time.Now().Add(5 * time.Minute)); err != nil {
		return nil, err
	}

	return &client{conn: conn, reader: bufio.NewReaderSize(conn, len(zeros)), small: requestText(http.MethodGet, "/orders/1701?expand=items", 0)}, nil
}

// dial connects a client, until the benchmark ends.
func (l *lane) dial(b *testing.B) *client {
	b.Helper()
	c, err := dialClient(l.address)
	require.NoError(b, err)
	b.Cleanup(func() { _ = c.conn.Close() })

	return c
}

// requestText is a request as it goes through a connection, without its body.
func requestText(method, path string, length int) []byte {
	var text bytes.Buffer
	fmt.Fprintf(&text, "%s %s HTTP/1.1\r\nHost: shop.example\r\n", method, path)
	if length > 0 {
		fmt.Fprintf(&text, "Content-Length: %d\r\n", length)
	}
	_ = cost.RequestHeaders().Write(&text)
	text.WriteString("\r\n")

	return text.Bytes()
}

// exchange sends a small request and reads its response.
func (c *client) exchange() error {
	if _, err := c.conn.Write(c.small); err != nil {
		return err
	}

	return c.readResponse(int64(len(smallBody)))
}

// transfer sends a large request, or asks for a large response.
func (c *client) transfer(path string) error {
	if path == downloadPath {
		if _, err := c.conn.Write(requestText(http.MethodGet, path, 0)); err != nil {
			return err
		}

		return c.readResponse(bodySize)
	}

	if _, err := c.conn.Write(requestText(http.MethodPost, path, bodySize)); err != nil {
		return err
	}
	if err := writeLarge(c.conn); err != nil {
		return err
	}

	return c.readResponse(0)
}

func (c *client) readResponse(length int64) error {
	resp, err := http.ReadResponse(c.reader, nil)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	n, err := io.Copy(io.Discard, resp.Body)
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK || n != length {
		return fmt.Errorf("status %d with %d bytes instead of %d", resp.StatusCode, n, length)
	}

	return nil
}

// clientAddress is the variable that makes this program a client of the server at the address in it.
const clientAddress = "TAP_CLIENT_OF"

// runAsClient makes a small exchange for each line of the standard input, which says how long to think before it, and answers with the
// time that it took. It returns the exit status.
func runAsClient(address string) int {
	c, err := dialClient(address)
	for line := bufio.NewScanner(os.Stdin); err == nil && line.Scan(); {
		var pause time.Duration
		if pause, err = time.ParseDuration(line.Text()); err != nil {
			break
		}
		time.Sleep(pause)
		started := time.Now()
		if err = c.exchange(); err == nil {
			fmt.Println(time.Since(started))
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)

		return 1
	}

	return 0
}

// distantClient is a client in a process of its own, as clients are. In the process of the server it would be charged for what that does
// after the response: while one of two processors is busy and the other one idle, Go's scheduler does not look at the network.
type distantClient struct {
	in  io.Writer
	out *bufio.Scanner
}

// startClient starts a distant client, which ends with the benchmark.
func startClient(b *testing.B, address string) *distantClient {
	b.Helper()
	command := exec.CommandContext(b.Context(), os.Args[0])
	command.Env = append(os.Environ(), clientAddress+"="+address)
	command.Stderr = os.Stderr
	in, err := command.StdinPipe()
	require.NoError(b, err)
	out, err := command.StdoutPipe()
	require.NoError(b, err)
	require.NoError(b, command.Start())
	b.Cleanup(func() {
		_ = in.Close()
		_ = command.Wait()
	})

	return &distantClient{in: in, out: bufio.NewScanner(out)}
}

// exchange lets the client think and then make a small exchange. It returns the time of the exchange.
func (c *distantClient) exchange(pause time.Duration) (time.Duration, error) {
	if _, err := fmt.Fprintln(c.in, pause); err != nil {
		return 0, err
	}
	if !c.out.Scan() {
		return 0, io.ErrUnexpectedEOF
	}

	return time.ParseDuration(c.out.Text())
}
