"""What a column is, and the types of its values."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

TEXT, INT, FLOAT, BOOL = pa.string(), pa.int64(), pa.float64(), pa.bool_()
TIME = pa.timestamp("us", tz="UTC")
FLOATS = pa.list_(FLOAT)


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    type: pa.DataType
    description: str
    unit: str = ""
    nullable: bool = True

    def field(self) -> pa.Field:
        metadata = {"description": self.description}
        if self.unit:
            metadata["unit"] = self.unit
        return pa.field(self.name, self.type, nullable=self.nullable, metadata=metadata)
