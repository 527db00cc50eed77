module torpor.dev/sdk/go

go 1.24.0
