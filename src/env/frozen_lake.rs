//! A walk over ice to the goal, around holes.
//!
//! Rules of gymnasium's FrozenLake as RAGEN uses it: start and goal are drawn anywhere on a square
//! board, every other cell is frozen with a probability of 0.8 and else a hole, boards without a way
//! are drawn again; 1 at the goal, 0 else; goal and hole end the trajectory; a step off the board stays.
//! Slippery ice (RAGEN's default) is `slip` = 2/3: with that probability a move goes to one of the two
//! sides, each alike. At most 10 actions. Observations are RAGEN's, to the letter: `P` player, `_`
//! empty, `O` hole, `G` goal, `X` player in hole, `√` player on goal; or coordinates; or both.

use std::collections::VecDeque;

use rand::{Rng, RngExt};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use super::{Answers, Environment, Outcome, Seed, error, require_probability, require_running};
use crate::error::Result;

const NAME: &str = "frozen_lake";
/// Boards drawn for one task before the set-up is given up.
const MAX_DRAWS: usize = 1_000;
const MAX_SIDE: usize = 100;

/// A move, in gymnasium's order: the neighbours in this circle are its sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// A column less.
    Left,
    /// A row more.
    Down,
    /// A column more.
    Right,
    /// A row less.
    Up,
}

impl Direction {
    /// All four, in order.
    pub const ALL: [Self; 4] = [Self::Left, Self::Down, Self::Right, Self::Up];

    /// Its name as an action.
    pub fn name(self) -> &'static str {
        match self {
            Self::Left => "Left",
            Self::Down => "Down",
            Self::Right => "Right",
            Self::Up => "Up",
        }
    }

    fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|direction| direction.name().eq_ignore_ascii_case(name))
    }

    /// This far along the circle.
    fn turned(self, quarters: usize) -> Self {
        Self::ALL[(self as usize + quarters) % 4]
    }
}

/// A board.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lake {
    rows: usize,
    columns: usize,
    /// By row.
    holes: Vec<bool>,
    start: usize,
    goal: usize,
}

impl Lake {
    /// A board from rows of gymnasium's letters: `S` start, `F` frozen, `H` hole, `G` goal.
    ///
    /// # Errors
    /// If the rows differ in length, there is not one start and one goal, or no way between them.
    pub fn parse(rows: &[String]) -> Result<Self> {
        let cells: Vec<char> = rows.iter().flat_map(|row| row.chars()).collect();
        let columns = rows.first().map_or(0, |row| row.chars().count());
        let problem = |problem: String| Err(error(NAME, format!("map: {problem}")));
        if rows.len() > MAX_SIDE || columns > MAX_SIDE {
            return problem(format!("expected at most {MAX_SIDE} rows and columns"));
        }
        if let Some(row) = rows.iter().find(|row| row.chars().count() != columns) {
            return problem(format!("expected rows of {columns} cells, found `{row}`"));
        }
        if let Some(cell) = cells.iter().find(|cell| !"SFHG".contains(**cell)) {
            return problem(format!("expected cells S, F, H and G, found `{cell}`"));
        }
        let places = |wanted: char| -> Vec<usize> {
            (0..cells.len()).filter(|place| cells[*place] == wanted).collect()
        };
        let (&[start], &[goal]) = (&places('S')[..], &places('G')[..]) else {
            return problem("expected one S and one G".into());
        };
        let holes = cells.iter().map(|cell| *cell == 'H').collect();
        let lake = Self { rows: rows.len(), columns, holes, start, goal };
        if !lake.is_solvable() {
            return problem("expected a way from S to G around the H, found none".into());
        }
        Ok(lake)
    }

    /// A square board with a way from start to goal, its cells frozen with probability `frozen`.
    ///
    /// # Errors
    /// If none came up in 1,000 draws: far more than boards that are worth a walk need.
    fn draw(size: usize, frozen: f64, random: &mut impl Rng) -> Result<Self> {
        let cells = size * size;
        for _ in 0..MAX_DRAWS {
            let mut holes: Vec<bool> = (0..cells).map(|_| !random.random_bool(frozen)).collect();
            let (start, goal) = (random.random_range(0..cells), random.random_range(0..cells));
            holes[start] = false;
            holes[goal] = false;
            let lake = Self { rows: size, columns: size, holes, start, goal };
            if start != goal && lake.is_solvable() {
                return Ok(lake);
            }
        }
        Err(error(
            NAME,
            format!(
                "expected a board with a way to the goal among {MAX_DRAWS} draws of size {size} with frozen {frozen}, found none; raise frozen"
            ),
        ))
    }

    /// Where a move ends.
    fn neighbour(&self, place: usize, direction: Direction) -> usize {
        let (row, column) = self.coordinates(place);
        match direction {
            Direction::Left if column > 0 => place - 1,
            Direction::Down if row + 1 < self.rows => place + self.columns,
            Direction::Right if column + 1 < self.columns => place + 1,
            Direction::Up if row > 0 => place - self.columns,
            _ => place,
        }
    }

    fn coordinates(&self, place: usize) -> (usize, usize) {
        (place / self.columns, place % self.columns)
    }

    /// Whether breadth-first search comes from start to goal.
    fn is_solvable(&self) -> bool {
        let mut seen = self.holes.clone();
        let mut frontier = VecDeque::from([self.start]);
        while let Some(place) = frontier.pop_front() {
            if place == self.goal {
                return true;
            }
            for direction in Direction::ALL {
                let next = self.neighbour(place, direction);
                if !std::mem::replace(&mut seen[next], true) {
                    frontier.push_back(next);
                }
            }
        }
        false
    }
}

/// Where boards come from.
#[derive(Clone, Debug, PartialEq)]
pub enum LakeSource {
    /// The same for every task.
    Fixed(Lake),
    /// Drawn by the task.
    Drawn {
        /// Rows and columns.
        size: usize,
        /// The probability that a cell is no hole.
        frozen: f64,
    },
}

/// How the lake is shown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum View {
    /// A sign a cell, a line a row.
    #[default]
    Grid,
    /// Coordinates of start, goal, player and holes.
    Coord,
    /// Coordinates, then the grid.
    GridCoord,
}

/// The lake with a player on it.
#[derive(Clone, Debug)]
pub struct FrozenLake {
    source: LakeSource,
    slip: f64,
    view: View,
    lake: Lake,
    player: usize,
    chance: ChaCha8Rng,
}

impl FrozenLake {
    /// An environment on such lakes; a move slips to one of its sides with probability `slip`.
    ///
    /// # Errors
    /// If a number is out of range, or no board can be drawn.
    pub fn new(source: LakeSource, slip: f64, view: View) -> Result<Self> {
        require_probability(NAME, "slip", slip)?;
        if let LakeSource::Drawn { size, frozen } = source {
            require_probability(NAME, "frozen", frozen)?;
            if !(2..=MAX_SIDE).contains(&size) {
                return Err(error(
                    NAME,
                    format!("size: expected 2 to {MAX_SIDE} rows and columns, found {size}"),
                ));
            }
        }
        let (lake, chance) = (source.lake(Seed::default())?, Seed::default().chance_generator());
        Ok(Self { source, slip, view, player: lake.start, lake, chance })
    }

    fn is_over(&self) -> bool {
        self.player == self.lake.goal || self.lake.holes[self.player]
    }

    /// Where a move in this direction goes.
    fn slipped(&mut self, direction: Direction) -> Direction {
        let chance: f64 = self.chance.random();
        if chance < self.slip / 2.0 {
            direction.turned(1)
        } else if chance < self.slip {
            direction.turned(3)
        } else {
            direction
        }
    }

    fn grid(&self) -> String {
        let sign = |place: usize| match place == self.player {
            true if self.lake.holes[place] => 'X',
            true if place == self.lake.goal => '√',
            true => 'P',
            false if self.lake.holes[place] => 'O',
            false if place == self.lake.goal => 'G',
            false => '_',
        };
        let row = |row: usize| -> String {
            (0..self.lake.columns).map(|column| sign(row * self.lake.columns + column)).collect()
        };
        (0..self.lake.rows).map(row).collect::<Vec<_>>().join("\n")
    }

    fn coordinates(&self) -> String {
        let Lake { rows, columns, holes, start, goal } = &self.lake;
        let at = |place: usize| {
            let (row, column) = self.lake.coordinates(place);
            format!("({row}, {column})")
        };
        let player = match self.player {
            player if player == *goal => "Player on goal",
            player if holes[player] => "Player in hole",
            _ => "Player",
        };
        let mut lines = vec![
            format!("Board size: {rows} rows x {columns} cols (zero-indexed)."),
            format!("Start: {}", at(*start)),
            format!("Goal: {}", at(*goal)),
            format!("{player}: {}", at(self.player)),
        ];
        let holes: Vec<String> = (0..holes.len()).filter(|place| holes[*place]).map(at).collect();
        if !holes.is_empty() {
            lines.push(format!("Holes: {}", holes.join(", ")));
        }
        lines.join("\n")
    }
}

impl LakeSource {
    fn lake(&self, seed: Seed) -> Result<Lake> {
        match self {
            Self::Fixed(lake) => Ok(lake.clone()),
            Self::Drawn { size, frozen } => Lake::draw(*size, *frozen, &mut seed.task_generator()),
        }
    }
}

impl Environment for FrozenLake {
    fn name(&self) -> &str {
        NAME
    }

    fn instruction(&self) -> String {
        let task = "You are on a frozen lake. Walk to the goal and keep out of the holes.";
        let ice = if self.slip > 0.0 {
            " The ice is slippery: a move may take you to a side of where you meant to go."
        } else {
            ""
        };
        let signs = match self.view {
            View::Coord => "Coordinates are (row, column), counted from 0 at the upper left.",
            View::Grid | View::GridCoord => {
                "P: player, _: empty, O: hole, G: goal, X: player in hole, √: player on goal."
            }
        };
        format!("{task}{ice}\n{signs}")
    }

    fn answers(&self) -> Answers {
        Answers::Sequence(Direction::ALL.map(|direction| direction.name().to_owned()).into())
    }

    fn max_actions(&self) -> usize {
        10
    }

    fn reset(&mut self, seed: Seed) -> Result<()> {
        self.lake = self.source.lake(seed)?;
        self.player = self.lake.start;
        self.chance = seed.chance_generator();
        Ok(())
    }

    fn observe(&self) -> String {
        match self.view {
            View::Grid => self.grid(),
            View::Coord => self.coordinates(),
            View::GridCoord => {
                format!("Coordinates: \n{}\nGrid Map: \n{}", self.coordinates(), self.grid())
            }
        }
    }

    fn act(&mut self, action: &str) -> Result<Option<Outcome>> {
        require_running(NAME, self.is_over())?;
        let Some(direction) = Direction::named(action.trim()) else { return Ok(None) };
        let before = self.player;
        let direction = self.slipped(direction);
        self.player = self.lake.neighbour(before, direction);
        let success = self.player == self.lake.goal;
        Ok(Some(Outcome {
            reward: f64::from(u8::from(success)),
            done: self.is_over(),
            success,
            effective: self.player != before,
        }))
    }

    fn fork(&self) -> Result<Box<dyn Environment>> {
        Ok(Box::new(self.clone()))
    }
}
