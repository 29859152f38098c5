module github.com/traefik-tap/tap

go 1.22

require github.com/stretchr/testify v1.11.1
