-- A small shop that sells what a garden needs. Prices are in cents.
CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT NOT NULL, town TEXT NOT NULL, since INTEGER NOT NULL);
CREATE TABLE products (id INTEGER PRIMARY KEY, name TEXT NOT NULL, kind TEXT NOT NULL, price INTEGER NOT NULL, stock INTEGER NOT NULL);
CREATE TABLE orders (id INTEGER PRIMARY KEY, customer INTEGER NOT NULL REFERENCES customers, day TEXT NOT NULL);
CREATE TABLE items ("order" INTEGER NOT NULL REFERENCES orders, product INTEGER NOT NULL REFERENCES products, count INTEGER NOT NULL);
INSERT INTO customers VALUES
  (1, 'Amara', 'Lindholm', 2015), (2, 'Bela', 'Seeburg', 2018), (3, 'Chen', 'Lindholm', 2019),
  (4, 'Dunja', 'Oakridge', 2016), (5, 'Emil', 'Seeburg', 2021), (6, 'Farid', 'Oakridge', 2022),
  (7, 'Greta', 'Lindholm', 2020), (8, 'Hiro', 'Westhaven', 2017);
INSERT INTO products VALUES
  (1, 'spade', 'tool', 2450, 12), (2, 'rake', 'tool', 1890, 7), (3, 'shears', 'tool', 1575, 20),
  (4, 'tomato seeds', 'seed', 250, 140), (5, 'bean seeds', 'seed', 220, 95), (6, 'sunflower seeds', 'seed', 310, 60),
  (7, 'clay pot', 'pot', 640, 33), (8, 'large pot', 'pot', 1420, 0), (9, 'watering can', 'tool', 1990, 5),
  (10, 'rose', 'plant', 890, 18), (11, 'lavender', 'plant', 475, 41), (12, 'apple tree', 'plant', 5200, 3);
INSERT INTO orders VALUES
  (1, 1, '2023-03-02'), (2, 3, '2023-03-05'), (3, 2, '2023-03-19'), (4, 1, '2023-04-01'), (5, 4, '2023-04-11'),
  (6, 7, '2023-04-12'), (7, 8, '2023-05-03'), (8, 5, '2023-05-20'), (9, 3, '2023-06-07'), (10, 4, '2023-06-30'),
  (11, 1, '2023-09-14'), (12, 7, '2023-10-02');
INSERT INTO items VALUES
  (1, 1, 1), (1, 4, 6), (2, 7, 4), (2, 11, 4), (3, 12, 1), (4, 9, 1), (4, 5, 3), (5, 3, 2), (5, 10, 5), (6, 6, 10),
  (7, 2, 1), (7, 1, 1), (8, 4, 2), (8, 7, 2), (9, 10, 3), (10, 8, 1), (10, 12, 2), (11, 11, 8), (11, 6, 2), (12, 3, 1);
