//! Event files of a run that is taken up again (DESIGN trap 11): the framing and the order in Rust, and
//! what TensorBoard makes of it.

mod common;

use std::path::{Path, PathBuf};

use common::stderr;
use gradprism::log::EventWriter;
use protobuf::Message;
use serde_json::{Value, json};
use tensorboard_proto::event::{Event, SessionLog_SessionStatus};

const TAG: &str = "reward/mean";
/// The run was killed after step 10, and goes on from a checkpoint after step 5.
const RESUMED_AT: i64 = 6;
/// Of a record: its length in 8 bytes and a checksum in 4 before the data, a checksum in 4 after.
const HEADER: usize = 12;
const FOOTER: usize = 4;

/// The value that a step has before and after the resumption.
fn value(step: i64, resumed: bool) -> f64 {
    if resumed { 100.0 + step as f64 } else { step as f64 }
}

fn write_steps(mut events: EventWriter, steps: std::ops::RangeInclusive<i64>, resumed: bool) {
    for step in steps {
        events.scalar(TAG, step, value(step, resumed)).unwrap();
    }
    events.flush().unwrap();
}

/// The event files of a folder in the order of their names, which is TensorBoard's.
fn files(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

/// Steps 1 to 10; with `damage`, cut in the middle of the last record, as a kill may leave it.
fn first_run(folder: &Path, damage: bool) {
    write_steps(EventWriter::create(folder).unwrap(), 1..=10, false);
    if damage {
        let path = files(folder).remove(0);
        let bytes = std::fs::read(&path).unwrap();
        let last = records(&bytes).pop().unwrap();
        let cut = bytes.len() - FOOTER - last.len() / 2;
        std::fs::write(&path, &bytes[..cut]).unwrap();
    }
}

/// The data of the records of a file, whose framing must be whole.
fn records(bytes: &[u8]) -> Vec<&[u8]> {
    let mut records = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        let header = &bytes[at..at + HEADER];
        let length = u64::from_le_bytes(header[..8].try_into().unwrap()) as usize;
        assert_eq!(number(&header[8..]), masked_crc32c(&header[..8]), "the length at {at}");
        let data = &bytes[at + HEADER..at + HEADER + length];
        let footer = &bytes[at + HEADER + length..at + HEADER + length + FOOTER];
        assert_eq!(number(footer), masked_crc32c(data), "the data at {at}");
        records.push(data);
        at += HEADER + length + FOOTER;
    }
    records
}

fn number(bytes: &[u8]) -> u32 {
    u32::from_le_bytes(bytes.try_into().unwrap())
}

/// CRC-32C, bit by bit from its reversed polynomial, rotated and shifted as TFRecord wants it.
fn masked_crc32c(bytes: &[u8]) -> u32 {
    let crc = !bytes.iter().fold(u32::MAX, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            (crc >> 1) ^ if crc & 1 == 1 { 0x82f6_3b78 } else { 0 }
        })
    });
    crc.rotate_right(15).wrapping_add(0xa282_ead8)
}

fn events(path: &Path) -> Vec<Event> {
    let bytes = std::fs::read(path).unwrap();
    records(&bytes).into_iter().map(|record| Event::parse_from_bytes(record).unwrap()).collect()
}

/// The checksum itself, on the check value of its definition (RFC 3720, B.4: `123456789`).
#[test]
fn the_checksum_is_crc32c() {
    let unmasked = masked_crc32c(b"123456789").wrapping_sub(0xa282_ead8).rotate_left(15);
    assert_eq!(unmasked, 0xe306_9283);
}

#[test]
fn a_resumed_file_begins_with_a_start_at_its_step() {
    let folder = tempfile::tempdir().unwrap();
    first_run(folder.path(), false);
    write_steps(EventWriter::resume(folder.path(), RESUMED_AT).unwrap(), 6..=10, true);
    let files = files(folder.path());
    assert_eq!(files.len(), 2);

    let first = events(&files[0]);
    assert!(first.iter().all(|event| !event.has_session_log()), "a new run is no resumption");
    let resumed = events(&files[1]);
    assert_eq!(resumed[0].get_file_version(), "brain.Event:2");
    assert_eq!(resumed[1].get_session_log().get_status(), SessionLog_SessionStatus::START);
    assert_eq!(resumed[1].get_step(), RESUMED_AT);
    let scalars: Vec<(i64, f64)> = resumed[2..]
        .iter()
        .map(|event| {
            let value = &event.get_summary().get_value()[0];
            assert_eq!(value.get_tag(), TAG);
            (event.get_step(), f64::from(value.get_simple_value()))
        })
        .collect();
    assert_eq!(scalars, (6..=10).map(|step| (step, value(step, true))).collect::<Vec<_>>());
    assert!(
        first.iter().chain(&resumed).map(Event::get_wall_time).is_sorted(),
        "time runs on from file to file"
    );
}

/// TensorBoard reads the files of a folder by name; writers of one process and second must not clash,
/// and the later ones must come later, also where the first digit of a fraction is 0.
#[test]
fn files_of_one_second_sort_by_time() {
    let folder = tempfile::tempdir().unwrap();
    for writer in 0..50 {
        write_steps(EventWriter::create(folder.path()).unwrap(), writer..=writer, false);
    }
    let steps: Vec<i64> =
        files(folder.path()).iter().map(|path| events(path).last().unwrap().get_step()).collect();
    assert_eq!(steps, (0..50).collect::<Vec<_>>());
    for path in files(folder.path()) {
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        let fraction = name.split('.').nth(4).unwrap();
        assert_eq!(fraction.len(), 9, "the nanoseconds of {name}");
    }
}

/// `[[step, value], …]` as TensorBoard's own reader gives them.
fn read(python: &Path, folder: &Path) -> Value {
    const SCRIPT: &str = r#"
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
run = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0})
run.Reload()
print(json.dumps([[e.step, e.value] for e in run.Scalars(sys.argv[2])]))
"#;
    let output = std::process::Command::new(python)
        .args(["-c", SCRIPT])
        .arg(folder)
        .arg(TAG)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn tensorboard_sees_no_zigzag() {
    let Some(python) = common::python("tensorboard_sees_no_zigzag") else { return };
    let once: Vec<Value> = (1..=10).map(|step| json!([step, value(step, step >= 6)])).collect();
    for damage in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        first_run(folder.path(), damage);
        write_steps(EventWriter::resume(folder.path(), RESUMED_AT).unwrap(), 6..=10, true);
        assert_eq!(read(&python, folder.path()), json!(once), "damaged: {damage}");
    }
}

/// Killed again before the first step that it would have repeated: the START alone takes steps 6 to 10
/// away.
#[test]
fn a_start_alone_purges() {
    let Some(python) = common::python("a_start_alone_purges") else { return };
    let folder = tempfile::tempdir().unwrap();
    first_run(folder.path(), false);
    drop(EventWriter::resume(folder.path(), RESUMED_AT).unwrap());
    let before: Vec<Value> = (1..=5).map(|step| json!([step, value(step, false)])).collect();
    assert_eq!(read(&python, folder.path()), json!(before));
}
