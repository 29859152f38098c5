// Command benthos runs examples/nats/pipeline.yml. It is Benthos, the engine that Redpanda Connect and Bento are built around, with what the
// file needs and nothing else. The output to NATS is written here, with the client of the NATS project, since Benthos leaves it to those two:
// it has the name, the options and the acknowledgement of theirs.
package main

import (
	"context"
	"fmt"
	"os"
	"strings"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	_ "github.com/redpanda-data/benthos/v4/public/components/io"
	_ "github.com/redpanda-data/benthos/v4/public/components/pure"
	"github.com/redpanda-data/benthos/v4/public/service"
)

func main() {
	spec := service.NewConfigSpec().Fields(
		service.NewStringListField("urls"),
		service.NewInterpolatedStringField("subject"),
		service.NewInterpolatedStringMapField("headers"),
		service.NewOutputMaxInFlightField(),
	)
	if err := service.RegisterOutput("nats_jetstream", spec, newOutput); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}

	service.RunCLI(context.Background())
}

// output publishes each message, and has it acknowledged by JetStream, before Benthos acknowledges it to the input.
type output struct {
	urls    []string
	subject *service.InterpolatedString
	headers map[string]*service.InterpolatedString

	conn      *nats.Conn
	publisher jetstream.Publisher
}

func newOutput(config *service.ParsedConfig, _ *service.Resources) (service.Output, int, error) {
	o := &output{}
	var err error
	if o.urls, err = config.FieldStringList("urls"); err != nil {
		return nil, 0, err
	}
	if o.subject, err = config.FieldInterpolatedString("subject"); err != nil {
		return nil, 0, err
	}
	if o.headers, err = config.FieldInterpolatedStringMap("headers"); err != nil {
		return nil, 0, err
	}
	maxInFlight, err := config.FieldMaxInFlight()

	return o, maxInFlight, err
}

func (o *output) Connect(context.Context) error {
	conn, err := nats.Connect(strings.Join(o.urls, ","))
	if err != nil {
		return err
	}
	publisher, err := jetstream.New(conn)
	if err != nil {
		conn.Close()
		return err
	}
	o.conn, o.publisher = conn, publisher

	return nil
}

func (o *output) Write(ctx context.Context, message *service.Message) error {
	subject, err := o.subject.TryString(message)
	if err != nil {
		return err
	}
	published := nats.NewMsg(subject)
	for name, value := range o.headers {
		text, err := value.TryString(message)
		if err != nil {
			return err
		}
		published.Header.Set(name, text)
	}
	if published.Data, err = message.AsBytes(); err != nil {
		return err
	}
	_, err = o.publisher.PublishMsg(ctx, published)

	return err
}

func (o *output) Close(context.Context) error {
	if o.conn != nil {
		o.conn.Close()
	}

	return nil
}
