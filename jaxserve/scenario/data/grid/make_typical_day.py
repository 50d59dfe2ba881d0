"""Regenerates typical_day.csv from hourly carbon-intensity files.

    python make_typical_day.py DIRECTORY

DIRECTORY holds `ci_lca_hourly_2021_2024.csv.gz`, `ci_direct_hourly_2021_2024.csv.gz` and
`site16_ci_lca_hourly_2021_2024_derived.csv.gz`: wide, `datetime_utc` first, one column a zone, gCO2eq/kWh, 2021 to 2024.
"""

import sys
from pathlib import Path

import pandas as pd


def read_hourly(path: Path) -> pd.DataFrame:
    """One row an hour (index: UTC), one column a zone, gCO2eq/kWh."""
    table = pd.read_csv(path, index_col="datetime_utc", keep_default_na=False, na_values=[""])
    table.index = pd.to_datetime(table.index, utc=True)
    if table.isna().any(axis=None) or len(table) != 35_064:
        raise SystemExit(f"{path}: expected the 35,064 hours of 2021 to 2024 without gaps")
    return table


def typical_day(hourly: pd.DataFrame) -> pd.DataFrame:
    """Mean by month and UTC hour: 288 rows, one column a zone, gCO2eq/kWh."""
    stamps = pd.DatetimeIndex(hourly.index)
    table = pd.DataFrame(hourly.groupby([stamps.month, stamps.hour]).mean())
    table.index.names = ["month", "hour_utc"]
    return table


def main(directory: Path) -> None:
    published = read_hourly(directory / "ci_lca_hourly_2021_2024.csv.gz")
    derived = read_hourly(directory / "site16_ci_lca_hourly_2021_2024_derived.csv.gz")
    # A zone that is published needs no derivation, so the published column wins.
    lca = published.join(derived.drop(columns=[zone for zone in derived if zone in published]))
    direct = read_hourly(directory / "ci_direct_hourly_2021_2024.csv.gz")
    table = pd.concat({"lca": typical_day(lca), "direct": typical_day(direct)}, names=["signal"])
    table = table[sorted(table.columns)].round(1)
    table.to_csv(Path(__file__).with_name("typical_day.csv"), lineterminator="\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]))
