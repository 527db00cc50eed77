module torpor.dev/tests/witness

go 1.24.0

require torpor.dev/sdk/go v0.0.0

replace torpor.dev/sdk/go => ../../../../sdk/go
